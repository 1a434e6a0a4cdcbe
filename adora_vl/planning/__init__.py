"""What a run will do and take, computed before a weight is loaded."""
