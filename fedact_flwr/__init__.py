"""FedACT on Flower: the app, its settings, run records and command line."""
