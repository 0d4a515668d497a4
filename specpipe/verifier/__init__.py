"""The target model behind one call: load it, keep its cache, score drafts, roll back."""
