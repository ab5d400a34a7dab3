"""One file a contestant: a class that builds the model and makes a step."""
