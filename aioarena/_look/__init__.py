"""Looking at channels and machines from outside, for the command line: nothing here takes part in a channel."""
