"""PreferenceData: prompts with a chosen and a rejected completion."""

from datamodules.followed import FollowedData


class PreferenceData(FollowedData):
    """Pairs to compare: a group of two completions, the chosen first. See GroupData for the settings.

    Accepts prompt/chosen/rejected as texts or messages, instruction pairs, ShareGPT pairs, and pairs of whole
    transcripts whose common part is the prompt. A `margin` column becomes the row value "margin", a `weight` column the
    weights. Several comparisons of one prompt stay groups of their own, on the same side of the validation split.
    """

    purpose = "preference"
