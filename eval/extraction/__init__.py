"""Finding the answer in a response without a model: by rules, in the order in which they are surest."""
