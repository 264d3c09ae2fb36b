"""Speculative decoding: drafters propose tokens that the target model then verifies.

The `Drafter` protocol is this room's door; `NGramDrafter` and `SuffixDrafter` draft from tokens
alone. The scheduler needs no change for them: draft tokens are known tokens that
`num_computed_tokens` has to catch up with.
"""
