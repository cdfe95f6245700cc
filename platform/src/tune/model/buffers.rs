//! The floats that one layer's forward and backward pass works in; all layers share them.

use leanstream_core::plan::Hyper;

use super::net::Site;
use crate::arena::discard;
use crate::tune::ops::AttentionShape;

/// Shapes that decide how large the buffers are.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Tokens of a micro-batch.
    pub tokens: usize,
    /// Rows of adapters; 0 without.
    pub rank: usize,
    /// Whether adapters drop inputs.
    pub dropout: bool,
    /// Whether heads are normed.
    pub head_norms: bool,
    /// Whether outputs are normed before they are added.
    pub posts: bool,
    /// Tokens of the head at once.
    pub head_tokens: usize,
    /// Tokens of the longest sequence.
    pub longest: usize,
    /// Threads that share the work.
    pub threads: usize,
}

impl Sizes {
    fn attention_floats(&self, hyper: &Hyper) -> usize {
        // A layer that slides, where there is one, and one that doesn't.
        let shapes = [0, hyper.window_period.max(1) - 1].map(|index| attention_shape(hyper, index));
        let need = shapes.map(|shape| {
            let back = shape.backward_floats(self.tokens, self.longest, self.threads);
            back.max(shape.forward_floats(self.longest, self.threads))
        });
        need[0].max(need[1])
    }
}

/// Attention of layer `index`.
pub fn attention_shape(hyper: &Hyper, index: u32) -> AttentionShape {
    AttentionShape {
        heads: hyper.heads as usize,
        kv_heads: hyper.kv_heads as usize,
        head_dim: hyper.head_dim as usize,
        scale: hyper.attn_scale,
        window: hyper.slides(index).then_some(hyper.window as usize),
    }
}

macro_rules! buffers {
    ($($(#[$meta:meta])* $name:ident: $len:expr;)+) => {
        /// One micro-batch's activations and gradients.
        pub struct Buffers {
            $($(#[$meta])* pub $name: Vec<f32>,)+
        }

        impl Buffers {
            /// All of them, zero.
            pub fn new(sizes: &Sizes, hyper: &Hyper) -> Self {
                $(
                    let len: fn(&Sizes, &Hyper) -> usize = $len;
                    let $name = vec![0.0; len(sizes, hyper)];
                )+
                Self { $($name,)+ }
            }

            /// Bytes of [`Buffers::new`].
            pub fn bytes(sizes: &Sizes, hyper: &Hyper) -> u64 {
                let lens: &[fn(&Sizes, &Hyper) -> usize] = &[$($len,)+];
                lens.iter().map(|len| len(sizes, hyper) as u64 * 4).sum()
            }
        }
    };
}

fn d(h: &Hyper) -> usize {
    h.d as usize
}
fn qd(h: &Hyper) -> usize {
    h.q_dim() as usize
}
fn kvd(h: &Hyper) -> usize {
    h.kv_dim() as usize
}
fn ff(h: &Hyper) -> usize {
    h.ff as usize
}
fn widest(h: &Hyper) -> usize {
    d(h).max(qd(h)).max(ff(h))
}

buffers! {
    /// The residual stream (tokens, d).
    x: |s, h| s.tokens * d(h);
    /// Its gradient (tokens, d).
    dx: |s, h| s.tokens * d(h);
    /// A norm's output before its weight (tokens, d).
    xhat: |s, h| s.tokens * d(h);
    /// A norm's output (tokens, d).
    n: |s, h| s.tokens * d(h);
    /// An output of half a layer, or the gradient of its input (tokens, d).
    t: |s, h| s.tokens * d(h);
    /// Attention's normed output before its norm's weight (tokens, d).
    attn_post: |s, h| if s.posts { s.tokens * d(h) } else { 0 };
    /// The same of the feed-forward network.
    ffn_post: |s, h| if s.posts { s.tokens * d(h) } else { 0 };
    /// Queries, then their gradients (tokens, heads, head_dim).
    q: |s, h| s.tokens * qd(h);
    /// Keys, likewise.
    k: |s, h| s.tokens * kvd(h);
    /// Values, likewise.
    v: |s, h| s.tokens * kvd(h);
    /// Attention's output (tokens, heads, head_dim).
    o: |s, h| s.tokens * qd(h);
    /// Queries before their norm's weight.
    q_hat: |s, h| if s.head_norms { s.tokens * qd(h) } else { 0 };
    /// Keys before their norm's weight.
    k_hat: |s, h| if s.head_norms { s.tokens * kvd(h) } else { 0 };
    /// The gradient of attention's output.
    d_o: |s, h| s.tokens * qd(h);
    /// What attention computes in.
    attention: |s, h| s.attention_floats(h);
    /// The gate, then its gradient (tokens, ff).
    gate: |s, h| if h.act.gated() { s.tokens * ff(h) } else { 0 };
    /// The other input product, then its gradient (tokens, ff).
    up: |s, h| s.tokens * ff(h);
    /// The activation's output, then its gradient (tokens, ff).
    act: |s, h| s.tokens * ff(h);
    /// Logits of a few tokens, then their gradients (head_tokens, vocab).
    logits: |s, h| s.head_tokens * h.vocab as usize;
    /// Normed streams of tokens that have a target (head_tokens, d).
    head_in: |s, h| s.head_tokens * d(h);
    /// Their gradients.
    head_back: |s, h| s.head_tokens * d(h);
}

impl Buffers {
    /// Gives the system the memory of what the head doesn't use any more, now that `sizes` has fewer tokens
    /// of it at once. It is zero should it be used again.
    ///
    /// # Errors
    /// The kernel refuses (locked memory).
    pub fn shorten_head(&mut self, sizes: &Sizes, hyper: &Hyper) -> std::io::Result<()> {
        let (d, vocab) = (hyper.d as usize, hyper.vocab as usize);
        let of_head = [
            (&mut self.logits, vocab),
            (&mut self.head_in, d),
            (&mut self.head_back, d),
        ];
        for (buffer, width) in of_head {
            discard(&mut buffer[sizes.head_tokens * width..])?;
        }
        Ok(())
    }

    /// What is inside a half at one of its linears: an input linear's output, or an output linear's input.
    pub fn inside(&mut self, site: Site) -> &mut Vec<f32> {
        match site {
            Site::Q => &mut self.q,
            Site::K => &mut self.k,
            Site::V => &mut self.v,
            Site::O => &mut self.o,
            Site::Gate => &mut self.gate,
            Site::Up => &mut self.up,
            Site::Down => &mut self.act,
        }
    }
}

/// What adapters compute in.
pub struct Low {
    /// `A x` (tokens, rank).
    pub x: Vec<f32>,
    /// Its gradient.
    pub dx: Vec<f32>,
    /// An adapter's input with what dropout leaves (tokens, widest); empty without dropout.
    pub dropped: Vec<f32>,
}

impl Low {
    /// All zero.
    pub fn new(s: &Sizes, h: &Hyper) -> Self {
        let [x, dx, dropped] = Self::floats(s, h).map(|floats| vec![0.0; floats]);
        Self { x, dx, dropped }
    }

    /// Bytes of [`Low::new`].
    pub fn bytes(s: &Sizes, h: &Hyper) -> u64 {
        Self::floats(s, h).iter().sum::<usize>() as u64 * 4
    }

    fn floats(s: &Sizes, h: &Hyper) -> [usize; 3] {
        let low = s.tokens * s.rank;
        [low, low, usize::from(s.dropout) * s.tokens * widest(h)]
    }
}

/// What stays exact of each layer: the factors by which norms divided, `1 / sqrt(mean(x^2) + eps)`.
pub struct Factors {
    floats: Vec<f32>,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    layers: usize,
    head_norms: bool,
    posts: bool,
}

/// One layer's.
pub struct LayerFactors<'a> {
    /// Of the norms before the halves, by [`Half`](super::net::Half): (tokens) each.
    pub norms: [&'a mut [f32]; 2],
    /// Of those of their outputs: (tokens) each, or nothing.
    pub posts: [&'a mut [f32]; 2],
    /// (tokens, heads), or nothing
    pub q: &'a mut [f32],
    /// (tokens, kv_heads), or nothing
    pub k: &'a mut [f32],
}

impl Factors {
    /// Room for all layers.
    pub fn new(s: &Sizes, h: &Hyper) -> Self {
        let mut factors = Self {
            floats: Vec::new(),
            tokens: s.tokens,
            heads: h.heads as usize,
            kv_heads: h.kv_heads as usize,
            layers: h.layers as usize,
            head_norms: s.head_norms,
            posts: s.posts,
        };
        factors.floats = vec![0.0; factors.stride() * factors.layers];
        factors
    }

    /// Bytes of [`Factors::new`].
    pub fn bytes(s: &Sizes, h: &Hyper) -> u64 {
        let heads = if s.head_norms {
            u64::from(h.heads + h.kv_heads)
        } else {
            0
        };
        let posts = if s.posts { 2 } else { 0 };
        (2 + posts + heads) * s.tokens as u64 * u64::from(h.layers) * 4
    }

    fn stride(&self) -> usize {
        let heads = if self.head_norms {
            self.heads + self.kv_heads
        } else {
            0
        };
        (2 + 2 * usize::from(self.posts) + heads) * self.tokens
    }

    /// Those of layer `index`, for the first `tokens` tokens.
    pub fn layer(&mut self, index: usize, tokens: usize) -> LayerFactors<'_> {
        let (heads, posts) = (usize::from(self.head_norms), usize::from(self.posts));
        let (q, k) = (heads * self.heads, heads * self.kv_heads);
        let stride = self.stride();
        let mut rest = &mut self.floats[index * stride..(index + 1) * stride];
        let mut take = |each: usize| {
            let part;
            (part, rest) = std::mem::take(&mut rest).split_at_mut(each * self.tokens);
            &mut part[..each * tokens]
        };
        LayerFactors {
            norms: [take(1), take(1)],
            posts: [take(posts), take(posts)],
            q: take(q),
            k: take(k),
        }
    }
}
