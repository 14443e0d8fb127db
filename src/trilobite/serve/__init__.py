"""transformers' serving application around one model of ours: safe by default, with a page to look at."""
