//! Who holds what of the budget while training, decided before anything is allocated.
//!
//! What a step can't do without comes first: program, data, trained tensors and their optimizer, one
//! layer's work space, two layers of weights, activations at one bit. What is left goes to activations up
//! to two bits, then to weights that stay in memory, then to wider activations.

use leanstream_core::act::Width;
use leanstream_core::ledger::{Kind, Ledger};

use super::act::Capacity;
use super::allotment::{Allotment, PAGE_BYTES};
use super::gemm::Products;
use super::model::buffers::{Buffers, Factors, Low, Sizes};
use super::model::columns::Columns;
use super::model::head::Losses;
use super::model::importance::Importance;
use super::model::kind::Kind as Saved;
use super::model::net::{Half, Net};
use super::model::params::{Params, Scheme};
use super::model::store::Layout;
use super::ops::Angles;
use super::optim::Moments;
use super::packing::Packing;
use super::settings::{ActBits, Recompute, Settings};
use super::team::STACK_BYTES;
use crate::cpu::vector::Vector;
use crate::error::Error;
use crate::run::memory::{READ_BUFFERS, margin_of, too_small};

/// Tokens of the head that share a chunk: as many as fit, at least the last.
const HEAD_TOKENS: [usize; 4] = [64, 32, 16, 8];
/// Log lines, reports, the figure's points.
const TEXT: u64 = 256 << 10;
/// Room for what can't be counted, and for page tables and the allocator's rounding.
const MARGIN: u64 = 1 << 20;

/// What a run asks for.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Bytes the process may hold.
    pub budget: u64,
    /// Bytes it holds already: program, tokenizer, norms, data.
    pub held: u64,
    /// Of these, the tokenizer's tables.
    pub tokenizer: u64,
    /// Of these, norms and biases.
    pub vectors: u64,
    /// Of these, tokens to train and evaluate on.
    pub data: u64,
    /// Tokens of a micro-batch.
    pub tokens: usize,
    /// Tokens of the longest sequence.
    pub longest: usize,
}

/// What was decided.
#[derive(Clone, Copy, Debug)]
pub struct MemoryPlan {
    /// Who holds what.
    pub ledger: Ledger,
    /// Slots of the weights' arena; 0 where all weights are trained.
    pub slots: u32,
    /// Pages of saved activations.
    pub pages: u32,
    /// Pages that there can ever be.
    pub pages_max: u32,
    /// Shapes of the work space.
    pub sizes: Sizes,
    /// By chunk of the head, the longest first: its tokens, and what all but slots and pages take with it.
    /// None where it is longer than what there is memory for.
    chunks: [Option<(usize, Ledger)>; HEAD_TOKENS.len()],
    shares: Shares,
}

impl MemoryPlan {
    /// The plan for another budget, for a run that was planned by this one: what can give way in mid-run
    /// does in the order in which it was given. `None` when not even the least fits.
    pub fn within(&self, budget: u64) -> Option<Self> {
        self.chunks.iter().flatten().find_map(|(tokens, fixed)| {
            let (ledger, slots, pages) = self.shares.of(fixed, budget);
            let mut plan = *self;
            plan.sizes.head_tokens = *tokens;
            (plan.ledger, plan.slots, plan.pages) = (ledger, slots as u32, pages as u32);
            ledger.check(budget).is_ok().then_some(plan)
        })
    }

    /// The least budget that a run could go on with.
    pub fn least(&self) -> u64 {
        self.least_ledger().total()
    }

    /// Who would hold what of it.
    pub fn least_ledger(&self) -> Ledger {
        let shortest = self.chunks.iter().flatten().last();
        let (_, fixed) = shortest.expect("a plan has a chunk");
        self.shares.of(fixed, 0).0
    }
}

/// What slots and pages take, and how many there may be.
#[derive(Clone, Copy, Debug)]
struct Shares {
    /// Bytes of a page with its part of the margin.
    page: u64,
    /// The same of a slot.
    slot: u64,
    slot_bytes: u64,
    pages_least: u64,
    /// Pages that come before slots beyond the least.
    pages_first: u64,
    pages_most: u64,
    slots_least: u64,
    slots_most: u64,
}

impl Shares {
    /// Divides what `fixed` leaves of a budget: all of it as a ledger, slots, pages. The least is counted
    /// whether or not there is room for it.
    fn of(&self, fixed: &Ledger, budget: u64) -> (Ledger, u64, u64) {
        let mut left = fixed.left(budget);
        let mut take = |wanted: u64, each: u64| {
            let got = wanted.min(left.checked_div(each).unwrap_or(0));
            left -= got * each;
            got
        };
        let (mut pages, mut slots) = (self.pages_least, self.slots_least);
        take(pages, self.page);
        take(slots, self.slot);
        pages += take(self.pages_first.saturating_sub(pages), self.page);
        slots += take(self.slots_most.saturating_sub(slots), self.slot);
        pages += take(self.pages_most.saturating_sub(pages), self.page);
        let page = PAGE_BYTES as u64;
        let mut ledger = *fixed;
        ledger
            .add_many(Kind::Arena, slots, self.slot_bytes)
            .and_then(|()| ledger.add_many(Kind::Activations, pages, page))
            .and_then(|()| {
                let margin = slots * (self.slot - self.slot_bytes) + pages * (self.page - page);
                ledger.add(Kind::Margin, margin)
            })
            .expect("a ledger of possible sizes");
        (ledger, slots, pages)
    }
}

/// Room for all tensors of `tokens` tokens at once.
pub fn capacity(net: &Net, posts: bool, tokens: usize, pages: u32) -> Capacity {
    let tensors = (net.layers.len() * Saved::COUNT) as u32;
    let mut capacity = Capacity::new(PAGE_BYTES, pages, tensors);
    for _ in &net.layers {
        for kind in Saved::ALL {
            let width = kind.width(&net.hyper, posts);
            if width > 0 {
                capacity = capacity.and(tokens, width);
            }
        }
    }
    capacity
}

/// Widths of all tensors that may be saved, by their ids.
pub fn widths_of(net: &Net, posts: bool) -> impl Iterator<Item = usize> + Clone + '_ {
    let layer = move |_| Saved::ALL.map(|kind| kind.width(&net.hyper, posts));
    (0..net.layers.len()).flat_map(layer)
}

/// Decides.
///
/// # Errors
/// [`Error::Budget`] with the table and the least budget.
pub fn plan(
    net: &Net,
    layout: Option<&Layout>,
    params: &Params,
    settings: &Settings,
    vector: Vector,
    request: &Request,
) -> Result<MemoryPlan, Error> {
    let with = |tokens| with_head(net, layout, params, settings, vector, request, tokens);
    let mut all = with(HEAD_TOKENS[0]);
    all.chunks = HEAD_TOKENS.map(|tokens| with(tokens).chunks[0]);
    let Some(mut plan) = all.within(request.budget) else {
        return Err(too_small(&all.least_ledger(), request.budget, request.held));
    };
    // There is no memory beyond this for slots and for the head, however much the budget rises.
    plan.shares.slots_most = u64::from(plan.slots);
    for chunk in &mut plan.chunks {
        *chunk = chunk.filter(|(tokens, _)| *tokens <= plan.sizes.head_tokens);
    }
    Ok(plan)
}

/// Shapes of the work space.
fn sizes(net: &Net, settings: &Settings, request: &Request, head_tokens: usize) -> Sizes {
    let first = &net.layers[0];
    let (rank, dropout) = match settings.scheme {
        Scheme::Lora { rank, dropout, .. } => (rank, dropout > 0.0),
        Scheme::Full => (0, false),
    };
    Sizes {
        tokens: request.tokens,
        rank,
        dropout,
        head_norms: first.q_norm.is_some(),
        posts: first.post(Half::Attention).is_some(),
        head_tokens,
        longest: request.longest,
        threads: settings.threads,
    }
}

/// The plan of the least, with a chunk of the head's tokens.
fn with_head(
    net: &Net,
    layout: Option<&Layout>,
    params: &Params,
    settings: &Settings,
    vector: Vector,
    request: &Request,
    head_tokens: usize,
) -> MemoryPlan {
    let hyper = &net.hyper;
    let sizes = sizes(net, settings, request, head_tokens);
    let mut ledger = Ledger::new();
    let mut add = |kind, bytes: u64| {
        // Sizes of a checked model and a batch below 2^32 tokens don't pass 64 bits.
        ledger.add(kind, bytes).expect("a ledger of possible sizes");
    };
    let counted = request.tokenizer + request.vectors + request.data;
    add(Kind::Program, request.held.saturating_sub(counted));
    add(Kind::Tokenizer, request.tokenizer);
    add(Kind::Vectors, request.vectors);
    add(Kind::Data, request.data + Packing::bytes(request.tokens));
    let moments: u64 = params
        .tensors
        .iter()
        .map(|tensor| Moments::bytes(settings.moments, tensor.range().len()) as u64)
        .sum();
    add(Kind::Trained, params.count as u64 * 8 + moments);
    let angles = 2 * Angles::bytes(request.longest, hyper.rope_dims as usize) as u64;
    add(
        Kind::Scratch,
        Buffers::bytes(&sizes, hyper)
            + Low::bytes(&sizes, hyper)
            + Losses::bytes(request.tokens, head_tokens)
            + Products::bytes_for(vector, settings.threads) as u64
            + angles
            + Importance::bytes(net.layers.len(), request.tokens),
    );
    let (columns, rows) = Columns::bytes(widths_of(net, sizes.posts), settings.threads);
    add(Kind::Activations, Factors::bytes(&sizes, hyper) + columns);
    add(Kind::Scratch, rows);
    add(Kind::ReadBuffers, READ_BUFFERS);
    add(Kind::Stacks, (settings.threads * STACK_BYTES) as u64);
    add(Kind::Text, TEXT);

    let allotment = Allotment::new(
        hyper,
        sizes.posts,
        request.tokens,
        settings.act,
        settings.recompute,
    );
    let (pages_least, pages_most) = allotment.pages(request.tokens, hyper);
    let pages_max = pages_most.min(u64::from(u32::MAX)) as u32;
    let room = capacity(net, sizes.posts, request.tokens, pages_max.max(1));
    add(
        Kind::Plan,
        room.bytes() + allotment.bytes() + layout.map_or(0, Layout::table_bytes),
    );
    let fixed = ledger.total();
    ledger
        .add(Kind::Margin, MARGIN + margin_of(fixed))
        .expect("a ledger of possible sizes");

    let slot_bytes = layout.map_or(0, |layout| layout.slot_bytes as u64);
    let slots = layout.map_or(0, Layout::slots_all);
    let two = settings.act == ActBits::Auto && settings.recompute != Recompute::Layers;
    let shares = Shares {
        page: PAGE_BYTES as u64 + margin_of(PAGE_BYTES as u64),
        slot: slot_bytes + margin_of(slot_bytes),
        slot_bytes,
        pages_least,
        pages_first: if two {
            allotment.pages_at(Width::Two)
        } else {
            pages_least
        },
        pages_most,
        slots_least: u64::from(layout.map_or(0, Layout::slots_least).min(slots)),
        slots_most: u64::from(slots),
    };
    let mut chunks = [None; HEAD_TOKENS.len()];
    chunks[0] = Some((head_tokens, ledger));
    let (ledger, slots, pages) = shares.of(&ledger, 0);
    MemoryPlan {
        ledger,
        slots: slots as u32,
        pages: pages as u32,
        pages_max,
        sizes,
        chunks,
        shares,
    }
}
