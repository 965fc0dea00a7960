"""SupervisedData: prompts with one completion each."""

from datamodules.base import GroupData


class SupervisedData(GroupData):
    """Rows to imitate: a group of one completion. See GroupData for the settings.

    Accepts plain text, prompt and completion, instruction/input/output, chat messages and ShareGPT conversations; of
    preference rows it takes the chosen completion. The loss is on completions only; plain text is all completion.
    """

    purpose = "supervised"
