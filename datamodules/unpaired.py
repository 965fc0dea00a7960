"""UnpairedData: completions that somebody found good or bad, each by itself."""

from datamodules.followed import FollowedData


class UnpairedData(FollowedData):
    """Labelled completions: the row value "label" is 1 for a good completion, 0 for a bad one. See GroupData for the
    settings.

    Accepts what SupervisedData does with a column `label` (true or false, 1 or 0), and every format of pairs: the
    chosen completion is a good one and the rejected a bad one, both behind the prompt that they share. `batch_size`
    counts prompts, so a pair counts once. A `weight` column weighs a row's completions.
    """

    purpose = "unpaired"
