"""Reading finished runs: a page of one, a comparison of several."""
