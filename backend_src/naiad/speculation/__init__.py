"""Speculative decoding: drafters propose tokens that the target model then verifies.

A step's drafts in three calls. `Drafter.propose` guesses how each sequence goes on: `NGramDrafter` and
`SuffixDrafter` from tokens alone, for next to nothing. `SpeculationPolicy.plan` says how much of each
guess pays. When the target has verified that, `AcceptanceState.update` takes in how much of it was
right. The scheduler needs no change for them: draft tokens are known tokens that
`num_computed_tokens` has to catch up with.
"""
