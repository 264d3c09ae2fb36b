"""What all frontends share: the table of fields, the typed request and its checks. No Triton here."""
