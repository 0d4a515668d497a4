"""This package's parts inside other people's programs: `generate` of `transformers`, and vLLM."""
