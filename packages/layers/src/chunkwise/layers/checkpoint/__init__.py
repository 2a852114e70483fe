"""From the files of a model to the config and the weights of a layer, and back."""
