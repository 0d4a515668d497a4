"""Pages for people: self-contained HTML from what result.json holds. Computes no result of its own."""
