"""The command line of kbatch."""
