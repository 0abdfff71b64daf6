"""All that is particular of one family of models, as a row; families never import each other."""
