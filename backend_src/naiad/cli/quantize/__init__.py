"""`naiad quantize`: makes a quantised copy of a checkpoint and measures what it lost."""
