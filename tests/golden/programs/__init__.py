"""The sample networks as a user would write them in plain torch. These files import torch and nothing of ours."""
