"""Multi-token prediction (MTP, NEXTN): the layers that a model was trained with to look ahead."""
