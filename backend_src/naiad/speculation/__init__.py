"""Speculative decoding: drafters propose tokens that the target model then verifies.

`Drafter.propose` guesses how sequences continue: `NGramDrafter` and `SuffixDrafter` from tokens alone,
at almost no cost; `ModelDrafter` with a model, whose passes take time. `SpeculationPolicy.plan` decides
how many draft tokens are worth verifying: free drafts are made first and then cut, a draft model is
asked only for what the plan contains. `AcceptanceState.update` records how many the target accepted.
`Speculator` combines these parts. For the scheduler, drafts are tokens of a row that
`num_computed_tokens` has to catch up with, like any others.
"""
