"""One global stream of packed sequences, shared out so that any number of readers goes on from any point."""
