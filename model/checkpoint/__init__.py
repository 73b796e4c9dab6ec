"""What lies on disk: the config, the files, weights as the network wants them."""
