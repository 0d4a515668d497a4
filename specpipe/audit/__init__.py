"""The proofs that nothing is lost. Each test of the audit is one file and gives one `Finding`.

exact.py enumerates the sampler on table models; greedy.py and sampled.py judge token ids against the real target,
whoever made them; proposals.py compares draws with the q that came with them. None of them knows configs or pages.
"""
