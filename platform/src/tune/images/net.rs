//! The shapes of classifiers: steps one after the other, what each keeps for the backward pass, and where
//! its parameters lie.
//!
//! Kept in few bits: each batch norm's `xhat` (where ReLU follows, its distance to where that begins), and each output that a linear or convolution takes in and
//! that can't be made again from an `xhat`, its exact mask and its parameters. Kept exactly: a bit for each
//! input of ReLU, two for each output of a max-pool, and each norm's factors.

use super::conv::Conv;
use super::pool::MaxPool;

/// A trained tensor in the flat vector of parameters.
#[derive(Clone, Debug)]
pub struct Param {
    /// Its name.
    pub name: String,
    /// Its first parameter.
    pub offset: usize,
    /// How many it has.
    pub len: usize,
    /// Inputs of an output: what its first values are drawn by. 0: it begins as a constant.
    pub fan_in: usize,
    /// That constant.
    pub constant: f32,
    /// Whether weight decay applies: to weights, not to norms and biases.
    pub decays: bool,
}

impl Param {
    /// Where it lies.
    #[must_use]
    pub fn range(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// Exact bytes that each image of a batch keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exact {
    /// Bytes of an image that lie before, in all.
    pub before: usize,
    /// Bytes an image.
    pub len: usize,
}

/// A tensor that is saved in few bits: `len` floats an image. Its number is its id.
#[derive(Clone, Debug)]
pub struct Kept {
    /// What it is.
    pub name: String,
    /// Floats an image.
    pub len: usize,
}

/// Where the input of a convolution or linear comes from in the backward pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    /// It is the batch.
    Images,
    /// It was saved: the tensor's number.
    Saved(usize),
    /// It is a unit's output, made again from what that saved: the unit's number.
    Unit(usize),
    /// It is what this step, a max-pool, took from this unit's output.
    Pooled {
        /// The unit's number.
        unit: usize,
        /// The step's number.
        step: usize,
    },
}

/// A convolution and its batch norm.
#[derive(Clone, Copy, Debug)]
pub struct Unit {
    /// The convolution.
    pub conv: Conv,
    /// Its input.
    pub input: Input,
    /// Number of its weights' parameter; the norm's `gamma` and `beta` follow.
    pub param: usize,
    /// The norm's first channel among all norms'.
    pub channel: usize,
    /// Number of the saved `xhat`.
    pub xhat: usize,
    /// ReLU's bits, where ReLU follows.
    pub mask: Option<Exact>,
}

/// A step.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// A unit with ReLU.
    Unit(usize),
    /// A residual block: `relu(second(first(x)) + x)`, or `+ shortcut(x)`.
    Block {
        /// Unit with ReLU.
        first: usize,
        /// Unit without.
        second: usize,
        /// Unit without, where the shape changes.
        shortcut: Option<usize>,
        /// The last ReLU's bits.
        mask: Exact,
    },
    /// The largest of 2x2 pixels.
    MaxPool {
        /// The pooling.
        pool: MaxPool,
        /// Where the largest were.
        places: Exact,
    },
    /// The mean of all pixels.
    Average {
        /// Channels of a pixel.
        channels: usize,
    },
    /// A linear with a bias.
    Linear {
        /// Its input.
        input: Input,
        /// Floats that come in.
        ins: usize,
        /// Floats that go out.
        outs: usize,
        /// Number of its weights' parameter; the bias follows.
        param: usize,
        /// ReLU's bits, where ReLU follows.
        mask: Option<Exact>,
    },
}

/// A step with its output.
#[derive(Clone, Copy, Debug)]
pub struct Stage {
    /// The step.
    pub step: Step,
    /// Floats of an image that it puts out.
    pub len: usize,
    /// Number of the tensor as which its output is saved, if it is.
    pub output: Option<usize>,
}

/// A classifier.
#[derive(Clone, Debug)]
pub struct Net {
    /// Height, width and channels of its images.
    pub shape: [usize; 3],
    /// How many classes it tells apart.
    pub classes: usize,
    /// In order; the last one's output are the classes' logits.
    pub stages: Vec<Stage>,
    /// Convolutions with their norms.
    pub units: Vec<Unit>,
    /// In the order of their offsets.
    pub params: Vec<Param>,
    /// Tensors that are saved, by id.
    pub kept: Vec<Kept>,
    /// Exact bytes of an image.
    pub exact_len: usize,
    /// Channels of all norms.
    pub channels: usize,
}

/// What the next step takes in while a net is put together.
#[derive(Clone, Copy)]
enum Output {
    Input(Input),
    /// Of a step that saves nothing it could be made from.
    Fresh(usize),
}

/// Puts a net together, step by step.
pub struct Builder {
    net: Net,
    shape: [usize; 3],
    output: Output,
}

impl Builder {
    /// For images of (height, width, channels).
    #[must_use]
    pub fn new(shape: [usize; 3]) -> Self {
        Self {
            net: Net {
                shape,
                classes: 0,
                stages: Vec::new(),
                units: Vec::new(),
                params: Vec::new(),
                kept: Vec::new(),
                exact_len: 0,
                channels: 0,
            },
            shape,
            output: Output::Input(Input::Images),
        }
    }

    /// A convolution with batch norm and ReLU.
    #[must_use]
    pub fn unit(mut self, outs: usize, kernel: usize, stride: usize) -> Self {
        let input = self.input();
        let unit = self.push_unit(input, outs, kernel, stride);
        self.net.units[unit].mask = Some(self.exact_bits());
        self.push(Step::Unit(unit), Output::Input(Input::Unit(unit)));
        self
    }

    /// A residual block of two 3x3 convolutions; the first one has the stride.
    #[must_use]
    pub fn block(mut self, outs: usize, stride: usize) -> Self {
        if let Output::Input(Input::Pooled { step, .. }) = self.output {
            // Made again it would need the room that a block needs.
            self.output = Output::Fresh(step);
        }
        let (input, shape) = (self.input(), self.shape);
        let first = self.push_unit(input, outs, 3, stride);
        self.net.units[first].mask = Some(self.exact_bits());
        let second = self.push_unit(Input::Unit(first), outs, 3, 1);
        let shortcut = (stride > 1 || outs != shape[2]).then(|| {
            let out = std::mem::replace(&mut self.shape, shape);
            let unit = self.push_unit(input, outs, 1, stride);
            assert_eq!(self.shape, out, "both ways lead to the same shape");
            unit
        });
        let mask = self.exact_bits();
        let step = Step::Block {
            first,
            second,
            shortcut,
            mask,
        };
        self.push(step, Output::Fresh(self.net.stages.len()));
        self
    }

    /// The largest of 2x2 pixels.
    #[must_use]
    pub fn max_pool(mut self) -> Self {
        let [height, width, channels] = self.shape;
        let pool = MaxPool {
            height,
            width,
            channels,
        };
        let step = self.net.stages.len();
        let places = self.exact(pool.place_bytes());
        self.shape = [height / 2, width / 2, channels];
        let output = match self.output {
            Output::Input(Input::Unit(unit)) => Output::Input(Input::Pooled { unit, step }),
            _ => Output::Fresh(step),
        };
        self.push(Step::MaxPool { pool, places }, output);
        self
    }

    /// The mean of all pixels.
    #[must_use]
    pub fn average(mut self) -> Self {
        let channels = self.shape[2];
        self.shape = [1, 1, channels];
        let step = self.net.stages.len();
        self.push(Step::Average { channels }, Output::Fresh(step));
        self
    }

    /// A linear of all floats of an image, with ReLU or without.
    #[must_use]
    pub fn linear(mut self, outs: usize, relu: bool) -> Self {
        let input = self.input();
        let ins = self.len();
        let step = self.net.stages.len();
        let param = self.push_param(format!("linear{step}.weight"), outs * ins, ins, 0.0);
        self.push_param(format!("linear{step}.bias"), outs, 0, 0.0);
        self.shape = [1, 1, outs];
        let mask = relu.then(|| self.exact_bits());
        let step = Step::Linear {
            input,
            ins,
            outs,
            param,
            mask,
        };
        self.push(step, Output::Fresh(self.net.stages.len()));
        self
    }

    /// The net, whose last step's outputs are logits.
    ///
    /// # Panics
    /// The last step isn't a linear without ReLU.
    #[must_use]
    pub fn build(mut self) -> Net {
        let last = self.net.stages.last().map(|stage| stage.step);
        assert!(
            matches!(last, Some(Step::Linear { mask: None, .. })),
            "a net ends with a linear"
        );
        self.net.classes = self.len();
        self.net
    }

    fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The next step's input; what can't be made again is saved from now on.
    fn input(&mut self) -> Input {
        match self.output {
            Output::Input(input) => input,
            Output::Fresh(step) => {
                let stage = &mut self.net.stages[step];
                let len = stage.len;
                let kept = *stage.output.get_or_insert_with(|| {
                    self.net.kept.push(Kept {
                        name: format!("output{step}"),
                        len,
                    });
                    self.net.kept.len() - 1
                });
                self.output = Output::Input(Input::Saved(kept));
                Input::Saved(kept)
            }
        }
    }

    fn push(&mut self, step: Step, output: Output) {
        self.net.stages.push(Stage {
            step,
            len: self.len(),
            output: None,
        });
        self.output = output;
    }

    fn push_unit(&mut self, input: Input, outs: usize, kernel: usize, stride: usize) -> usize {
        let [height, width, ins] = self.shape;
        let conv = Conv {
            height,
            width,
            ins,
            outs,
            kernel,
            stride,
        };
        let unit = self.net.units.len();
        let fan_in = kernel * kernel * ins;
        let param = self.push_param(format!("conv{unit}.weight"), conv.weights(), fan_in, 0.0);
        self.push_param(format!("norm{unit}.gamma"), outs, 0, 1.0);
        self.push_param(format!("norm{unit}.beta"), outs, 0, 0.0);
        self.net.kept.push(Kept {
            name: format!("norm{unit}"),
            len: conv.out_len(),
        });
        self.net.units.push(Unit {
            conv,
            input,
            param,
            channel: self.net.channels,
            xhat: self.net.kept.len() - 1,
            mask: None,
        });
        self.net.channels += outs;
        self.shape = [conv.out_height(), conv.out_width(), outs];
        unit
    }

    fn push_param(&mut self, name: String, len: usize, fan_in: usize, constant: f32) -> usize {
        let offset = self.net.count();
        self.net.params.push(Param {
            name,
            offset,
            len,
            fan_in,
            constant,
            decays: fan_in > 0,
        });
        self.net.params.len() - 1
    }

    fn exact(&mut self, len: usize) -> Exact {
        let before = self.net.exact_len;
        self.net.exact_len += len;
        Exact { before, len }
    }

    /// A bit for each float of the shape.
    fn exact_bits(&mut self) -> Exact {
        self.exact(self.len().div_ceil(8))
    }
}

impl Net {
    /// ResNet for small images, of `3 stages * 2 * blocks + 2` layers: ResNet-8 has one block a stage,
    /// ResNet-20 three. Channels: 16, 32, 64.
    #[must_use]
    pub fn resnet(blocks: usize, shape: [usize; 3], classes: usize) -> Self {
        let mut net = Builder::new(shape).unit(16, 3, 1);
        for (stage, outs) in [16, 32, 64].into_iter().enumerate() {
            for block in 0..blocks {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                net = net.block(outs, stride);
            }
        }
        net.average().linear(classes, false).build()
    }

    /// Two convolutions, each with a max-pool, and a linear.
    #[must_use]
    pub fn cnn(shape: [usize; 3], classes: usize) -> Self {
        Builder::new(shape)
            .unit(16, 3, 1)
            .max_pool()
            .unit(32, 3, 1)
            .max_pool()
            .linear(classes, false)
            .build()
    }

    /// Three linears.
    #[must_use]
    pub fn mlp(shape: [usize; 3], classes: usize) -> Self {
        Builder::new(shape)
            .linear(256, true)
            .linear(128, true)
            .linear(classes, false)
            .build()
    }

    /// The one of this name: `resnet8`, `resnet20`, `cnn` or `mlp`.
    #[must_use]
    pub fn named(name: &str, shape: [usize; 3], classes: usize) -> Option<Self> {
        match name {
            "resnet8" => Some(Self::resnet(1, shape, classes)),
            "resnet20" => Some(Self::resnet(3, shape, classes)),
            "cnn" => Some(Self::cnn(shape, classes)),
            "mlp" => Some(Self::mlp(shape, classes)),
            _ => None,
        }
    }

    /// How many parameters it has.
    #[must_use]
    pub fn count(&self) -> usize {
        self.params.last().map_or(0, |param| param.range().end)
    }

    /// Floats of an image.
    #[must_use]
    pub fn image_len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Floats of an image at its largest, in any step.
    #[must_use]
    pub fn widest(&self) -> usize {
        let units = self.units.iter().map(|unit| unit.conv.out_len());
        let stages = self.stages.iter().map(|stage| stage.len);
        units.chain(stages).fold(self.image_len(), usize::max)
    }

    /// All its convolutions.
    #[must_use]
    pub fn convs(&self) -> Vec<Conv> {
        self.units.iter().map(|unit| unit.conv).collect()
    }

    /// Floats of an image that are saved: what f32 would save at the least, masks and places following
    /// from it.
    #[must_use]
    pub fn kept_len(&self) -> usize {
        self.kept.iter().map(|kept| kept.len).sum()
    }

    /// Floats of an image that an engine saves which knows each operation alone: inputs of convolutions
    /// and linears, inputs of norms, outputs of ReLU, each once; and 8 bytes for each place.
    #[must_use]
    pub fn eager_len(&self) -> usize {
        let norms: usize = self.units.iter().map(|unit| unit.conv.out_len()).sum();
        let inner = self.units.iter().filter(|unit| unit.mask.is_some());
        let inner: usize = inner.map(|unit| unit.conv.out_len()).sum();
        let others = self.stages.iter().map(|stage| match stage.step {
            Step::Unit(_) | Step::Linear { mask: None, .. } => 0,
            Step::Block { .. } | Step::Average { .. } | Step::Linear { .. } => stage.len,
            Step::MaxPool { .. } => 3 * stage.len,
        });
        norms + inner + others.sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_parameters_of_known_nets() {
        let net = Net::resnet(1, [32, 32, 3], 10);
        // By hand: 3x3 kernels of 3-16, 16-16 twice, 16-32, 32-32, 32-64, 64-64; 1x1 of 16-32, 32-64;
        // norms of 16 three times, 32 and 64 three times each; a linear of 64-10.
        let kernels = 9 * (48 + 2 * 256 + 512 + 1024 + 2048 + 4096) + 512 + 2048;
        assert_eq!(net.count(), kernels + 2 * 3 * (16 + 32 + 64) + 650);
        let net = Net::resnet(3, [32, 32, 3], 10);
        assert_eq!(net.units.len(), 19 + 2);
        assert_eq!(net.classes, 10);
        assert_eq!(net.widest(), 32 * 32 * 16);
    }

    #[test]
    fn what_is_saved_can_not_be_made_again() {
        let net = Net::resnet(1, [8, 8, 1], 10);
        let names: Vec<&str> = net.kept.iter().map(|kept| &*kept.name).collect();
        // The stem's output follows from its norm; the last block's isn't needed.
        let want = [
            "norm0", "norm1", "norm2", "output1", "norm3", "norm4", "norm5", "output2", "norm6",
            "norm7", "norm8", "output4",
        ];
        assert_eq!(names, want);
        assert_eq!(net.kept_len(), 4 * 1024 + 4 * 512 + 3 * 256 + 64);
        let bits = 3 * 1024 + 2 * 512 + 2 * 256;
        assert_eq!(net.exact_len, bits / 8);
        let net = Net::cnn([8, 8, 1], 10);
        assert_eq!(net.kept_len(), 1024 + 512);
        assert_eq!(net.exact_len, (1024 + 512) / 8 + (256 + 128) / 4);
        let net = Net::mlp([8, 8, 1], 10);
        assert_eq!((net.kept_len(), net.exact_len), (384, 48));
    }
}
