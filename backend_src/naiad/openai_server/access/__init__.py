"""Who may ask for what: keys, the roles that routes need, and the limits of keys."""
