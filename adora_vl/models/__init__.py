"""Which models are supported, and how they are loaded; CONTRIBUTING.md says how to add a family."""
