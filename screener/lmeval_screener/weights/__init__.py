"""Files of weights: their formats, and the rows and the final norm that are read from them."""
