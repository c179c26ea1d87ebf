"""Commands of the command line beside train and preview, each group in a module with a `register`."""
