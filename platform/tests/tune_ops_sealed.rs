//! Operations of a training step allocate nothing, with one thread and with two. Alone in its program,
//! since the allocator counts every thread.

use leanstream::alloc::{Count, Counting};
use leanstream::cpu::Rows;
use leanstream::cpu::vector::Vector;
use leanstream::run::rope::RopeParams;
use leanstream::tune::ops::{
    Angles, AttentionShape, Direction, Dropout, activate, activate_backward, add, add_bias,
    attention, attention_backward, bias_gradient, cross_entropy, dropout, embed, embed_backward,
    embed_floats, fill, loss_sum, relu_sq, relu_sq_backward, rms_norm, rms_norm_backward,
    rms_norm_in_place, rms_norm_weight_gradient, scale, scale_columns,
};
use leanstream::tune::optim::{
    AdamW, Decay, Moments, Precision, Schedule, Update, clip_factor, sum_squares,
};
use leanstream::tune::team::Team;
use leanstream_core::act::codec::Counter;
use leanstream_core::plan::{Activation, RopeStyle};
use leanstream_core::quant::QuantType;

#[global_allocator]
static ALLOC: Counting = Counting::new();

const TOKENS: usize = 75;
const D: usize = 96;
const VOCAB: usize = 1000;
const SEGMENTS: [(usize, usize); 2] = [(0, 70), (70, 5)];
const SHAPE: AttentionShape = AttentionShape {
    heads: 6,
    kv_heads: 2,
    head_dim: 16,
    window: Some(40),
    scale: 0.25,
};

#[test]
fn a_step_of_every_operation_allocates_nothing() {
    for threads in [1, 2] {
        let team = &Team::new(threads).unwrap();
        for v in Vector::available() {
            step(team, v);
        }
    }
}

fn step(team: &Team, v: Vector) {
    let wave = |n: usize| -> Vec<f32> { (0..n).map(|i| (i as f32 * 0.7).sin()).collect() };
    let tokens: Vec<u32> = (0..TOKENS as u32).map(|t| t * 31 % VOCAB as u32).collect();
    let positions: Vec<u32> = (0..TOKENS as u32).collect();
    let table = wave(VOCAB * D);
    let bytes: Vec<u8> = table.iter().flat_map(|x| x.to_le_bytes()).collect();
    let rows = Rows {
        ty: QuantType::F32,
        cols: D,
        bytes: &bytes,
    };
    let angles = Angles::new(
        &RopeParams {
            style: RopeStyle::Halves,
            head_dim: 16,
            n_rot: 16,
            base: 1e4,
            linear_factor: 1.0,
            freq_factors: None,
        },
        TOKENS,
    )
    .unwrap();
    let mut x = vec![0.0; TOKENS * D];
    let [mut y, mut xhat, mut dx, mut h] = [(); 4].map(|()| x.clone());
    let kv = TOKENS * SHAPE.kv_heads * SHAPE.head_dim;
    let (mut k, mut values) = (wave(kv), wave(kv));
    let (mut rstd, mut weight, mut dweight) = (vec![0.0; TOKENS], wave(D), vec![0.0; D]);
    let floats = SHAPE
        .backward_floats(TOKENS, 70, 2)
        .max(SHAPE.forward_floats(70, 2));
    let mut scratch = vec![0.0; floats];
    let (mut logits, mut losses) = (wave(TOKENS * VOCAB), vec![0.0; TOKENS]);
    let mut dtable = vec![0.0; VOCAB * D];
    let mut moments = [Precision::F32, Precision::Bits8].map(|p| Moments::new(p, D));
    let schedule = Schedule {
        peak: 1e-3,
        warmup: 1,
        steps: 2,
        decay: Decay::Cosine,
        floor: 0.1,
    };
    let mask = Dropout {
        share: 0.1,
        counter: Counter {
            seed: 0,
            step: 0,
            tensor: 0,
        },
    };

    ALLOC.seal();
    embed(team, v, &rows, &tokens, 2.0, &mut x);
    embed_floats(team, v, &table, &tokens, 2.0, &mut x);
    rms_norm(team, v, &x, &weight, 1e-5, &mut y, &mut xhat, &mut rstd);
    scale_columns(team, v, &xhat, &weight, &mut h);
    rms_norm_in_place(team, v, &mut h, &weight, 1e-5, &mut y, &mut rstd);
    add_bias(team, v, &mut y, &weight);
    angles.turn(team, v, &positions, &mut y, Direction::Forward);
    attention(
        team,
        v,
        &SHAPE,
        &SEGMENTS,
        &y,
        &k,
        &values,
        &mut h,
        &mut scratch,
    );
    attention_backward(
        team,
        v,
        &SHAPE,
        &SEGMENTS,
        &mut y,
        &mut k,
        &mut values,
        &h,
        &mut scratch,
    );
    angles.turn(team, v, &positions, &mut y, Direction::Backward);
    for act in [Activation::Silu, Activation::Gelu, Activation::Relu] {
        activate(team, v, act, &x, &y, &mut h);
        activate_backward(team, v, act, &mut h, &mut x, &mut y);
    }
    relu_sq(team, v, &x, &mut h);
    relu_sq_backward(team, v, &mut h, &mut y);
    dropout(team, v, mask, &x, &mut h, true);
    cross_entropy(team, v, &mut logits, VOCAB, &tokens, 0.5, 30.0, &mut losses);
    cross_entropy(team, v, &mut logits, VOCAB, &tokens, 0.5, 0.0, &mut losses);
    let loss = loss_sum(&losses);
    rms_norm_backward(team, v, &xhat, &rstd, &weight, &h, &mut dx, true);
    rms_norm_weight_gradient(team, v, &xhat, &h, &mut dweight);
    bias_gradient(team, v, &h, &mut dweight);
    embed_backward(team, v, &tokens, &dx, 2.0, &mut dtable);
    fill(team, &mut x, 1.0);
    scale(team, v, &mut x, 0.5);
    add(team, v, &mut x, &dx);
    let factor = clip_factor(sum_squares(team, v, &dweight).sqrt(), 1.0);
    for moments in &mut moments {
        let update = Update {
            rate: schedule.at(0),
            factor: factor.unwrap(),
            ..Update::default()
        };
        AdamW::default().step(team, v, &mut weight, &dweight, moments, &update);
    }
    ALLOC.unseal();
    assert_eq!(ALLOC.since_seal(), Count::default(), "{v:?}");
    assert!(loss.is_finite());
}
