"""Variables of the environment by which the runner tells the suite's process what to do."""

# The command line of `naiad serve` but for the model, a JSON list.
COMMAND = "NAIAD_SUITE_SERVE"
# The checkpoint for chats, and those for files that take their model for a base model or offer it tools.
CHECKPOINT = "NAIAD_SUITE_CHECKPOINT"
BASE_CHECKPOINT = "NAIAD_SUITE_BASE_CHECKPOINT"
TOOL_CHECKPOINT = "NAIAD_SUITE_TOOL_CHECKPOINT"
# The suite's kind.
KIND = "NAIAD_SUITE_KIND"
# A file that gets one JSON object a line: {"test", "outcome", "text"}.
RECORD = "NAIAD_SUITE_RECORD"
# Regular expressions, a JSON list: tests whose ids have one are not run.
NOT_RUN = "NAIAD_SUITE_NOT_RUN"
