"""Speculative decoding: drafters propose tokens that the target model then verifies.

`Drafter.propose` guesses how sequences go on: `NGramDrafter` and `SuffixDrafter` from tokens alone,
for next to nothing; `ModelDrafter` with a model, whose passes cost time. `SpeculationPolicy.plan` says
how much of each guess pays: of a free one afterwards, of one that costs passes before it is made.
When the target has verified that, `AcceptanceState.update` takes in how much of it was right.
`Speculator` joins them. The scheduler needs no change for drafts: they are tokens of a row that
`num_computed_tokens` has to catch up with.
"""
