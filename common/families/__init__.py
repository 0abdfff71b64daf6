"""Everything particular to one family of models, as a row of data; families never import each other."""
