"""One comparison: what is compared (measures), and how a ratio of two conditions is computed, judged and said."""
