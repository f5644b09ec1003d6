"""Small models that draw: autoencoders, diffusion, adversarial nets."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

LATENT = 2


def pictures(count, *, seed=0):
    """Images of shape (count, 8, 8, 1) in [0, 1], without labels."""
    return (np.random.default_rng(seed).random((count, 8, 8, 1)).astype("float32"),)


class Sampling(layers.Layer):
    """Draws a latent vector by its mean and the logarithm of its variance."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return mean + ops.exp(0.5 * log_variance) * noise


class VariationalAutoencoder(keras.Model):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.trackers = {
            name: keras.metrics.Mean(name=name)
            for name in ("loss", "reconstruction_loss", "kl_loss")
        }

    @property
    def metrics(self):
        return list(self.trackers.values())

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance, z = self.encoder(data)
            entropy = keras.losses.binary_crossentropy(data, self.decoder(z))
            reconstruction = ops.mean(ops.sum(entropy, axis=(1, 2)))
            kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            kl = ops.mean(ops.sum(kl, axis=1))
            total = reconstruction + kl
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for tracker, value in zip(self.metrics, (total, reconstruction, kl), strict=True):
            tracker.update_state(value)
        return {name: tracker.result() for name, tracker in self.trackers.items()}


def variational_autoencoder():
    inputs = layers.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(inputs)
    x = layers.Dense(8, activation="relu")(layers.Flatten()(x))
    mean, log_variance = layers.Dense(LATENT)(x), layers.Dense(LATENT)(x)
    encoder = keras.Model(inputs, [mean, log_variance, Sampling()([mean, log_variance])])
    latent = layers.Input((LATENT,))
    x = layers.Reshape((4, 4, 2))(layers.Dense(32, activation="relu")(latent))
    x = layers.Conv2DTranspose(4, 3, activation="relu", strides=2, padding="same")(x)
    decoder = keras.Model(latent, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x))
    model = VariationalAutoencoder(encoder, decoder)
    model.compile(optimizer=keras.optimizers.Adam())
    return model


class Diffusion(keras.Model):
    """DDPM: noise of a random strength is foretold; a second net averages the weights."""

    STEPS = 10

    def __init__(self, network, ema_network):
        super().__init__()
        self.network, self.ema_network = network, ema_network
        kept = np.cumprod(1 - np.linspace(1e-4, 0.02, self.STEPS))
        self.signal = tf.constant(np.sqrt(kept), dtype=tf.float32)
        self.noise = tf.constant(np.sqrt(1 - kept), dtype=tf.float32)

    def train_step(self, images):
        rows = tf.shape(images)[0]
        t = tf.random.uniform(minval=0, maxval=self.STEPS, shape=(rows,), dtype=tf.int64)
        with tf.GradientTape() as tape:
            noise = tf.random.normal(shape=tf.shape(images), dtype=images.dtype)
            shape = [rows, 1, 1, 1]
            signal = tf.reshape(tf.gather(self.signal, t), shape)
            noisy = signal * images + tf.reshape(tf.gather(self.noise, t), shape) * noise
            foretold = self.network([noisy, t], training=True)
            loss = self.loss(noise, foretold)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        weights = zip(self.network.weights, self.ema_network.weights, strict=True)
        for weight, average in weights:
            average.assign(0.99 * average + 0.01 * weight)
        return {"loss": loss}


class TimeEmbedding(layers.Layer):
    """Sines of the time of a step; its frequencies are constants of float32."""

    def __init__(self, width):
        super().__init__()
        self.frequencies = tf.exp(tf.range(width // 2, dtype=tf.float32) * -1.0)

    def call(self, t):
        angles = tf.cast(t, tf.float32)[:, None] * self.frequencies[None, :]
        return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)


def diffusion():
    def network():
        images, t = layers.Input((8, 8, 1)), layers.Input((), dtype="int64")
        time = layers.Dense(4, activation="swish")(TimeEmbedding(4)(t))
        x = layers.GroupNormalization(2)(layers.Conv2D(4, 3, padding="same")(images))
        x = layers.Add()([x, time[:, None, None, :]])
        return keras.Model([images, t], layers.Conv2D(1, 3, padding="same")(x))

    net, average = network(), network()
    average.set_weights(net.get_weights())
    model = Diffusion(net, average)
    model.compile(loss=keras.losses.MeanSquaredError(), optimizer=keras.optimizers.Adam(2e-4))
    return model


class Adversarial(keras.Model):
    """GAN: a discriminator and a generator that sees it updated, each with an optimizer."""

    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.seeds = keras.random.SeedGenerator(3)
        self.d_metric = keras.metrics.Mean(name="d_loss")
        self.g_metric = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self):
        return [self.d_metric, self.g_metric]

    def train_step(self, images):
        if isinstance(images, tuple):
            images = images[0]
        rows = ops.shape(images)[0]
        latent = keras.random.normal((rows, LATENT), seed=self.seeds)
        both = ops.concatenate([self.generator(latent), images], axis=0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seeds)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        latent = keras.random.normal((rows, LATENT), seed=self.seeds)
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(latent))
            g_loss = self.loss_fn(ops.zeros((rows, 1)), judged)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {"d_loss": self.d_metric.result(), "g_loss": self.g_metric.result()}


def adversarial():
    discriminator = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(4, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.GlobalMaxPooling2D(),
            layers.Dense(1),
        ]
    )
    generator = keras.Sequential(
        [
            layers.Input((LATENT,)),
            layers.Dense(32),
            layers.Reshape((4, 4, 2)),
            layers.Conv2DTranspose(4, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )
    model = Adversarial(discriminator, generator)
    model.compile(
        d_optimizer=keras.optimizers.Adam(3e-4),
        g_optimizer=keras.optimizers.Adam(3e-4),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model
