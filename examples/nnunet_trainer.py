# SPDX-License-Identifier: MIT
"""nnU-Net with normfuse's layers: a trainer whose networks are converted, in training and in inference.

Copy this file into nnunetv2/training/nnUNetTrainer/variants/ of your installation, and train with it:

    nnUNetv2_train DATASET 3d_fullres 0 -tr nnUNetTrainerNormfuse

Instance norms, the additions before them and the leaky ReLUs after them become one call each. Checkpoints are those of
nnUNetTrainer, both ways. Where nnU-Net compiles the network, it compiles the converted one.
"""
import functools

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

import normfuse.torch as nft


class nnUNetTrainerNormfuse(nnUNetTrainer):
    # nnU-Net looks at the names of the arguments, which differ between its versions: wraps keeps them.
    @staticmethod
    @functools.wraps(nnUNetTrainer.build_network_architecture)
    def build_network_architecture(*words, **named):
        network = nnUNetTrainer.build_network_architecture(*words, **named)
        print("normfuse:", str(nft.convert(network)).splitlines()[0])
        return network
