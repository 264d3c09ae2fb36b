"""What the text of an answer has to look like: formats that clients ask for, and calls of tools."""
