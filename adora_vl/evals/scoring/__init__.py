"""Reading answers out of responses, and counting what is right."""
