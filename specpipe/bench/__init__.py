"""What `bench` is made of: the combinations, their interleaved decoding, the figures, and their prediction."""
