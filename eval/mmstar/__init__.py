"""MMStar: two ways to read the letter, and the two leakage metrics."""
