"""The table of model kinds: each with what of it breaks tools, a build and a data function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from models import generative, image, similarity, tabular, text


class Kind(NamedTuple):
    """A kind of model that people train."""

    name: str
    feature: str  # What of it breaks tools that change how a model trains.
    build: Callable[[], keras.Model]
    data: Callable[..., tuple[Any, ...]]  # Rows -> what `fit` takes; with another `seed` others.
    objective: str = "val_loss"  # To be minimised.


KINDS = (
    Kind(
        "Convolutional net",
        "augmentation and dropout in the model",
        image.plain_cnn,
        image.images,
    ),
    Kind(
        "Vision transformer",
        "top-5 accuracy has no float16; positions looked up",
        image.vision_transformer,
        image.images,
    ),
    Kind(
        "Compact convolutional transformer",
        "a layer that draws for each example; label smoothing",
        image.compact_transformer,
        image.one_hot_images,
    ),
    Kind("U-Net", "BatchNormalization; a label a pixel", image.unet, image.masked_images),
    Kind("Object detection", "two outputs, a loss divided by objects", image.detector, image.boxes),
    Kind(
        "Variational autoencoder",
        "own `train_step`, draws by Keras",
        generative.variational_autoencoder,
        generative.pictures,
        "loss",
    ),
    Kind(
        "DDPM",
        "own `train_step`, draws by TensorFlow, constants of float32, averaged weights",
        generative.diffusion,
        generative.pictures,
        "loss",
    ),
    Kind(
        "GAN",
        "own `train_step` with two optimizers, the second net sees the first updated",
        generative.adversarial,
        generative.pictures,
        "g_loss",
    ),
    Kind("CTC", "`add_loss` of a value a row; dicts without targets", text.captcha, text.captchas),
    Kind(
        "Siamese net",
        "a shared net with BatchNormalization; a loss that returns a scalar",
        similarity.siamese,
        similarity.image_pairs,
    ),
    Kind(
        "Two towers",
        "the other examples of the batch are the negatives",
        similarity.two_towers,
        similarity.queries,
    ),
    Kind(
        "CLIP",
        "own `train_step` with a loss over all pairs of the batch",
        similarity.dual_encoder,
        similarity.captioned,
    ),
    Kind(
        "PointNet",
        "a regularizer that multiplies rows with each other; BatchNormalization",
        similarity.point_net,
        similarity.point_clouds,
    ),
    Kind(
        "Named entities",
        "a loss divided by the tokens of the batch",
        text.named_entities,
        text.tagged,
    ),
    Kind(
        "Transformer to transformer",
        "masks through layers; a loss that ignores padding; a dataset of dicts",
        text.seq2seq_transformer,
        text.translations,
    ),
    Kind(
        "Mini-GPT",
        "a second output without a loss; masks made for the rows of a batch",
        text.mini_gpt,
        text.next_tokens,
    ),
    Kind(
        "Masked language model",
        "own `train_step` with weights a token and a loss without reduction",
        text.masked_language_model,
        text.masked_tokens,
        "loss",
    ),
    Kind(
        "TabTransformer",
        "sample weights in the dataset; texts as inputs",
        tabular.tab_transformer,
        tabular.weighted_table,
    ),
    Kind(
        "FeatureSpace",
        "preprocessing and crosses in the model",
        tabular.feature_space,
        tabular.column_table,
    ),
    Kind(
        "Matrix factorisation",
        "a `call` that takes one product for the batch",
        tabular.matrix_factorization,
        tabular.ratings,
    ),
    Kind(
        "Graph network",
        "the graph as constants of float32 in the model",
        tabular.graph_network,
        tabular.node_indices,
    ),
    Kind("Multiple-instance learning", "bags as lists of inputs", image.instance_bags, image.bags),
    Kind(
        "Distillation",
        "a teacher in a `compute_loss` of its own",
        image.distiller,
        image.images,
    ),
    Kind(
        "Loss endpoint",
        "`add_loss` of a mean, targets as an input; a regularizer on activations",
        tabular.logistic_endpoint,
        tabular.endpoint_rows,
    ),
    Kind(
        "Multi-output", "losses by name with weights; masks", tabular.multi_output, tabular.tickets
    ),
)
