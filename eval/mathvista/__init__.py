"""MathVista (testmini): the official prompt, three rule sets, three ways to find the answer in a response."""
