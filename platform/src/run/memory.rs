//! Who holds what of the budget, decided before anything is allocated.
//!
//! Whatever a run can't do without comes first: the program, the tokenizer, the KV cache, the
//! activations of one token. What is left is shared between a larger prompt batch (each batch reads
//! every weight once) and the arena (what fits there is not read again).

use leanstream_core::ledger::{Kind, Ledger};
use leanstream_core::plan::pieces::{self, SlotChoice};
use leanstream_core::sparse::store::slots_least;
use leanstream_core::sparse::tables::Sizes;
use leanstream_core::stream::policy::cyclic::{Cyclic, Shape};
use leanstream_core::stream::tables;
use leanstream_core::units::{Piece, SlotId};

use super::attend::Attention;
use super::buffers::Buffers;
use super::head::{HeadRoom, Wanted};
use super::kv::{KvError, KvType};
use super::lora::Lora;
use super::model::{Info, Weights};
use super::packed::Packed;
use super::pass::SCORE_ROWS;
use super::score::Score;
use super::sparse::UnitTables;
use super::units::{UnitRoom, scratch_sizes};
use crate::cpu::Scratch;
use crate::error::{Error, mib};

/// Prompt tokens that share one reading of the weights, at most.
pub const BATCH_MAX: u32 = 512;

/// Stack of a compute thread. Kernels keep their tiles in registers and scratch.
pub const STACK_BYTES: usize = 128 << 10;

/// Slots have a size between these, unless a row is longer.
const SLOT_BYTES_LEAST: u32 = 32 << 10;
const SLOT_BYTES_MOST: u32 = 512 << 10;

/// Longest slot of a model with packed layers.
const STAGING_BYTES_MOST: u32 = 64 << 10;

/// Reads of units in flight, fewest and most.
const UNIT_READS: std::ops::RangeInclusive<u64> = 4..=32;

/// Slots are whole pages.
const PAGE: u32 = 4096;

/// What one request costs the device, in bytes that it could have read meanwhile; measured with
/// `leanstream bench` on virtual disks and in line with eMMC and NVMe data sheets.
const REQUEST_COST: u32 = 8 << 10;

/// Slots below which nothing can be kept in flight while something is computed.
const SLOTS_LEAST: u32 = 6;

/// Bytes of reads in flight that keep a device busy, and the fewest and most reads.
const FLIGHT_BYTES: u32 = 2 << 20;
const READS: std::ops::RangeInclusive<u32> = 4..=32;

/// What a storage backend holds beside the slots: the rings' pages, or its threads' stacks.
pub(crate) const READ_BUFFERS: u64 = 256 << 10;

/// Room for what can't be counted: the kernel's structures, a library's first use of something.
const MARGIN: u64 = 512 << 10;

/// Page tables and the allocator's rounding grow with what is held.
pub(crate) fn margin_of(bytes: u64) -> u64 {
    bytes.div_ceil(128)
}

/// By how much the pages that a process holds when it plans differ from run to run: 160 KiB were seen
/// in 60 runs side by side, by how the kernel maps a library's pages ahead.
pub(super) const HELD_VARIES: u64 = 256 << 10;

/// What the run asks for.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Bytes the process may hold.
    pub budget: u64,
    /// Bytes it holds already: program, tokenizer, resident vectors.
    pub held: u64,
    /// Positions of the KV cache.
    pub context: u32,
    /// Tokens of the longest prompt, as far as known: a larger batch would be wasted.
    pub prompt: u32,
    /// Largest batch, or as large as the budget suggests.
    pub batch: Option<u32>,
    /// Whether every token's logits are scored.
    pub score: bool,
    /// Compute threads.
    pub threads: u32,
    /// Type of its elements.
    pub kv_type: KvType,
    /// Of which logits use is made.
    pub wanted: Wanted,
    /// Alignment of reads.
    pub align: u32,
    /// Reads in flight, or as many as the device needs.
    pub queue_depth: Option<u16>,
}

/// What was decided.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    /// Who holds what.
    pub ledger: Ledger,
    /// Tokens of a prompt batch.
    pub batch: u32,
    /// Slots of the arena.
    pub slots: u32,
    /// Bytes of each.
    pub slot_bytes: u32,
    /// Reads in flight.
    pub reads_max: u16,
    /// Pieces that a pass uses.
    pub planned: u32,
    /// Pieces of an embedding matrix that no step multiplies by.
    pub loose: u32,
    /// What a packed model's units get.
    pub units: Option<UnitPlan>,
    /// Bytes of a thread's scratch for their up rows, and floats for their columns.
    pub unit_scratch: (usize, usize),
}

/// Memory of a packed model's units.
#[derive(Clone, Copy, Debug)]
pub struct UnitPlan {
    /// Slots of single units.
    pub slots: u32,
    /// Bytes of each.
    pub slot_bytes: u32,
    /// Reads in flight; each has a staging slot of the arena, behind the slots of the pieces.
    pub reads_max: u16,
    /// Units of all layers, and of the head.
    pub units: u32,
}

impl MemoryPlan {
    /// Slots of single units; 0 where nothing is packed.
    pub fn unit_slots(&self) -> u32 {
        self.units.map_or(0, |units| units.slots)
    }

    /// The plan as the engine's ranking sees it.
    pub fn shape(&self) -> Shape {
        Shape {
            planned: self.planned,
            loose: self.loose,
            rows: self.batch,
            slots: self.slots,
            reads_max: self.reads_max,
        }
    }

    /// Pieces that stay in memory once they have been read.
    pub fn kept(&self) -> u32 {
        Cyclic::new(self.shape()).kept()
    }
}

/// Decides.
///
/// # Errors
/// [`Error::Budget`] with the table and the least budget.
pub fn plan(info: &Info, weights: &Weights, request: &Request) -> Result<MemoryPlan, Error> {
    let most = request
        .batch
        .unwrap_or(BATCH_MAX)
        .min(BATCH_MAX)
        .clamp(1, request.prompt.max(1));
    // Batches of whole register tiles first; then the few-token ones for very small budgets.
    let sizes = (1..=most / 16)
        .rev()
        .map(|n| n * 16)
        .chain([8, 4, 2, 1])
        .filter(|n| *n <= most);
    let sizes = std::iter::once(most).chain(sizes);
    let all = arena_for_everything(weights, request);
    let mut last = None;
    for batch in sizes {
        let candidate = with_batch(info, weights, request, batch)
            .map_err(|error| Error::Usage(format!("--kv-type and -c: {error}")))?;
        let arena = candidate.ledger.get(Kind::Arena) + candidate.ledger.get(Kind::Units);
        let scratch = candidate.ledger.get(Kind::Scratch);
        if candidate.ledger.check(request.budget).is_ok()
            && (arena >= all || scratch <= arena / 4 || batch <= 16)
        {
            return Ok(candidate);
        }
        last = Some(candidate);
    }
    let least = last.expect("a batch of one was tried");
    if least.ledger.check(request.budget).is_ok() {
        return Ok(least);
    }
    Err(too_small(&least.ledger, request.budget, request.held))
}

/// That `budget` is less than what stands in `ledger`, of which the process holds `held` bytes already.
pub(crate) fn too_small(ledger: &Ledger, budget: u64, held: u64) -> Error {
    Error::Budget {
        budget,
        // The next process may hold a little more when it plans; what is named must do for it too.
        least: ledger.total() + HELD_VARIES.min(held),
        table: table(ledger),
    }
}

/// The ledger as printed lines.
pub fn table(ledger: &Ledger) -> String {
    let mut out = String::new();
    for (kind, bytes) in ledger.iter() {
        out.push_str(&format!("  {:<13}{:>12}\n", kind.name(), mib(bytes)));
    }
    out.push_str(&format!("  {:<13}{:>12}", "total", mib(ledger.total())));
    out
}

/// Arena bytes with which nothing is read twice.
fn arena_for_everything(weights: &Weights, request: &Request) -> u64 {
    let choice = choose(weights, request, u64::MAX);
    let units = weights.packed.as_ref().map_or(0, |packed| {
        packed.units() as u64 * u64::from(unit_slot_bytes(packed))
    });
    u64::from(choice.pieces) * u64::from(choice.slot_bytes) + units
}

/// Bytes of a unit's slot: a unit in whole cache lines.
fn unit_slot_bytes(packed: &Packed) -> u32 {
    packed.unit_bytes_max().next_multiple_of(64)
}

fn choose(weights: &Weights, request: &Request, arena: u64) -> SlotChoice {
    // At least 48 slots where the budget is small, so that a few long pieces don't fill it.
    // Staging slots of units are as large, and there are many of them.
    let unit = weights.packed.as_ref().map_or(0, Packed::unit_bytes_max);
    let least = SLOT_BYTES_LEAST.max(2 * request.align + unit);
    let most = match &weights.packed {
        // A head alone is read seldom: what its staging slots take counts less than long pieces.
        Some(packed) if !packed.layers().is_empty() => STAGING_BYTES_MOST,
        _ => SLOT_BYTES_MOST,
    };
    let most = (arena / 48).clamp(u64::from(least), u64::from(most.max(least))) as u32;
    let unit = PAGE.max(request.align);
    pieces::choose_slot(
        &weights.matrices,
        least,
        most,
        unit,
        request.align,
        REQUEST_COST,
    )
}

/// A plan with a given batch; its arena is what is left, or the least there must be.
fn with_batch(
    info: &Info,
    weights: &Weights,
    request: &Request,
    batch: u32,
) -> Result<MemoryPlan, KvError> {
    let kv_bytes = Attention::bytes(&info.hyper, request.context, batch, request.kv_type)?;
    let mut ledger = Ledger::new();
    let tokens = u64::from(batch);
    let threads = u64::from(request.threads);
    let mut add = |kind, bytes| {
        // Sizes of a checked model and a context below 2^32 don't pass 64 bits.
        ledger.add(kind, bytes).expect("a ledger of possible sizes");
    };
    let tokenizer = info.tokenizer.table_bytes();
    let packed_bytes = weights.packed.as_ref().map_or(0, Packed::bytes);
    let lora_bytes = weights.lora.as_ref().map_or(0, Lora::bytes);
    add(
        Kind::Program,
        request
            .held
            .saturating_sub(tokenizer + weights.vectors.bytes() + packed_bytes + lora_bytes),
    );
    add(Kind::Tokenizer, tokenizer);
    add(Kind::Vectors, weights.vectors.bytes());
    if let Some(lora) = &weights.lora {
        add(Kind::Adapters, lora_bytes);
        add(Kind::Scratch, lora.hidden_bytes(tokens));
    }
    add(Kind::KvCache, kv_bytes);
    let buffers = Buffers::bytes(&info.hyper, tokens);
    let widest = weights.matrices.iter().map(|m| m.cols).max().unwrap_or(0) as usize;
    let tile = if request.score {
        tokens * SCORE_ROWS as u64 * 4
    } else {
        0
    };
    let score = if request.score {
        Score::bytes(tokens, threads)
    } else {
        0
    };
    let (rows, columns) = unit_scratch(info, weights, request.threads);
    let thread = Scratch::bytes_for(widest) as u64
        + 4 * Attention::scratch_floats(&info.hyper) as u64
        + tile
        + rows as u64
        + 4 * columns as u64;
    // The sampler's candidates: a token and a weight for each.
    let sampler = u64::from(info.hyper.vocab) * 8;
    add(Kind::Scratch, buffers + score + threads * thread + sampler);
    if let Some(packed) = &weights.packed {
        add(Kind::Vectors, packed.bytes());
        let (ff, d) = (packed.ff() as u64, u64::from(info.hyper.d));
        add(Kind::Scratch, UnitRoom::bytes(ff, tokens, d));
        if info.packed {
            add(Kind::Scratch, Buffers::ahead_bytes(&info.hyper));
        }
        add(
            Kind::Plan,
            UnitTables::bytes(packed.layers().len() as u64, ff, packed.head_rows() as u64),
        );
        if packed.head().is_some() {
            let bytes = HeadRoom::bytes(request.wanted, info.hyper.vocab, ff);
            add(Kind::Scratch, bytes);
        }
    }
    add(Kind::ReadBuffers, READ_BUFFERS);
    add(Kind::Stacks, threads * STACK_BYTES as u64);
    add(Kind::Text, 128 << 10);
    let fixed = ledger.total();
    ledger
        .add(Kind::Margin, MARGIN + margin_of(fixed))
        .expect("a ledger of possible sizes");

    let left = ledger.left(request.budget);
    let choice = choose(weights, request, left);
    let loose = loose_pieces(info, weights, request, choice.slot_bytes);
    let planned = choice.pieces - loose;
    let plan_bytes = |slots: u64| {
        let pieces = u64::from(choice.pieces) + tokens;
        let each = size_of::<Piece>() + size_of::<tables::Mark>() + 2 * size_of::<SlotId>();
        pieces * each as u64 + slots * (size_of::<tables::Slot>() as u64 + 4) + tokens * 8
    };
    let slot_bytes = u64::from(choice.slot_bytes);
    let reads = request.queue_depth.map_or_else(
        || (FLIGHT_BYTES / choice.slot_bytes).clamp(*READS.start(), *READS.end()),
        u32::from,
    );
    let each = slot_bytes + margin_of(slot_bytes) + plan_bytes(1) - plan_bytes(0);
    // What the units can't do without comes out of what is left; then the pieces, then the units.
    let units = weights.packed.as_ref().map(|packed| {
        let bytes = unit_slot_bytes(packed);
        let count = packed.units() as u64;
        let per_slot = u64::from(bytes) + margin_of(u64::from(bytes)) + Sizes::SLOT;
        let least = u64::from(slots_least(packed.ff() as u32));
        let flights = (left / 32 / slot_bytes).clamp(*UNIT_READS.start(), *UNIT_READS.end());
        (bytes, count, per_slot, least.min(count.max(least)), flights)
    });
    let staging = units.map_or(0, |(.., flights)| flights);
    let kept_back = units.map_or(0, |(_, _, per_slot, least, _)| least * per_slot) + staging * each;
    // Room for all pieces and for reads of embedding rows beside them. Of an embedding that no step
    // multiplies by a token takes a row: units come first.
    let everything = u64::from(choice.pieces) + u64::from(reads.min(batch)) + 2;
    let everything_bytes = units.map_or(0, |(_, count, per_slot, ..)| {
        (everything + staging) * each + count * per_slot
    });
    let useful = if left.saturating_sub(plan_bytes(0)) < everything_bytes {
        everything - u64::from(loose)
    } else {
        everything
    };
    let fitting = (left.saturating_sub(plan_bytes(0) + kept_back)) / each;
    let slots = fitting.min(useful).max(u64::from(SLOTS_LEAST));
    let units = units.map(|(bytes, count, per_slot, least, flights)| {
        let left = left.saturating_sub(plan_bytes(0) + (slots + staging) * each);
        // Beside all units, a group's worth of slots that nothing is kept in costs nothing.
        let slots = (left / per_slot).clamp(least, count.max(least));
        UnitPlan {
            slots: slots as u32,
            slot_bytes: bytes,
            reads_max: flights as u16,
            units: count as u32,
        }
    });
    if let Some(units) = units {
        let slots = u64::from(units.slots);
        let bytes = u64::from(units.slot_bytes);
        ledger
            .add_many(Kind::Units, slots, bytes)
            .and_then(|()| ledger.add_many(Kind::Margin, slots, margin_of(bytes)))
            .and_then(|()| ledger.add_many(Kind::Plan, slots, Sizes::SLOT))
            .and_then(|()| ledger.add_many(Kind::Arena, staging, slot_bytes))
            .expect("a ledger of possible sizes");
    }
    let reads = reads.min((slots / 2) as u32).max(1) as u16;
    ledger
        .add(Kind::Plan, plan_bytes(slots))
        .expect("a ledger of possible sizes");
    ledger
        .add_many(Kind::Arena, slots, slot_bytes)
        .and_then(|()| ledger.add_many(Kind::Margin, slots, margin_of(slot_bytes)))
        .expect("a ledger of possible sizes");
    Ok(MemoryPlan {
        ledger,
        batch,
        slots: slots as u32,
        slot_bytes: choice.slot_bytes,
        reads_max: reads,
        planned,
        loose,
        units,
        unit_scratch: (rows, columns),
    })
}

/// Bytes of a thread's scratch for gate or up rows, and floats for columns.
fn unit_scratch(info: &Info, weights: &Weights, threads: u32) -> (usize, usize) {
    let row = weights
        .packed
        .iter()
        .flat_map(|packed| packed.layers())
        .flat_map(|layer| [layer.layout.gate, layer.layout.up])
        .flatten()
        .map(|(_, bytes)| bytes as usize)
        .max();
    if info.packed {
        scratch_sizes(row.unwrap_or(0), info.hyper.d as usize, threads as usize)
    } else {
        (0, 0)
    }
}

/// Pieces of the embedding matrix, where no step multiplies by it.
fn loose_pieces(info: &Info, weights: &Weights, request: &Request, slot_bytes: u32) -> u32 {
    if info.hyper.tied {
        return 0;
    }
    let embedding = &weights.matrices[weights.embedding.0 as usize];
    let rows = pieces::rows_per_piece(embedding, slot_bytes, request.align)
        .expect("the slot was chosen for it");
    embedding.rows.div_ceil(rows)
}
