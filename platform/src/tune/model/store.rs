//! Frozen weights while training: what has room stays, the rest streams, forward and then backward.
//!
//! A step walks the layers up and down again, so the order of use is known without asking. What lies
//! together in the file (a layer, usually; the head in parts) is one *span*, read by one request into
//! one slot, past the page cache, by the backends that `run` reads with. The head is used for each
//! chunk of tokens and stays first; then as many layers as there is room for, evenly spread, so that
//! the device works evenly; the others pass through a ring of two layers, the next one being read
//! while one is computed. Turning round at the top finds the last ones still there. When the budget falls,
//! spans that stayed stream from then on.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use leanstream_core::plan::{Matrix, MatrixId};
use leanstream_core::port::{Geometry, ReadCommand, ReadOutcome, Storage};
use leanstream_core::units::{Extent, FileId, PieceId, ReadId, SlotId};

use super::net::Net;
use crate::arena::{Arena, SlotBytes};
use crate::cpu::Rows;
use crate::error::Error;
use crate::io::{self, Backend, Source};

/// How long a wait for the device lasts before signals are looked at.
const WAIT_US: u32 = 20_000;
/// How often a read is tried.
const TRIES: u32 = 3;

/// Where the frozen weights lie and how they are cut.
#[derive(Clone, Debug)]
pub struct Layout {
    spans: Vec<Extent>,
    /// Spans of each layer, then of the head.
    groups: Vec<Range<u32>>,
    /// By matrix of a layer: its span, and its offset in that.
    places: Vec<Option<Place>>,
    /// Bytes of a slot.
    pub slot_bytes: usize,
    head_rows: u32,
    head_align: u32,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    span: u32,
    at: u32,
}

impl Layout {
    /// Cuts the matrices of a model into spans.
    ///
    /// # Errors
    /// A layer beyond what one request reads, in words.
    pub fn new(net: &Net, align: u32) -> Result<Self, &'static str> {
        let align64 = u64::from(align);
        let mut layout = Self {
            spans: Vec::new(),
            groups: Vec::new(),
            places: vec![None; net.matrices.len()],
            slot_bytes: 0,
            head_rows: 0,
            head_align: align,
        };
        for layer in &net.layers {
            let first = layout.spans.len() as u32;
            let mut ids: Vec<MatrixId> = layer.linears.iter().flatten().map(|l| l.matrix).collect();
            ids.sort_by_key(|id| {
                let matrix = &net.matrices[id.0 as usize];
                (matrix.file.0, matrix.offset)
            });
            let mut open: Option<(FileId, u64, u64)> = None;
            for id in ids {
                let matrix = &net.matrices[id.0 as usize];
                let end = matrix.offset + matrix.bytes();
                match &mut open {
                    // Norms and padding lie between; a gap that is longer than what follows isn't worth it.
                    Some((file, _, until))
                        if *file == matrix.file
                            && matrix.offset >= *until
                            && matrix.offset - *until <= matrix.bytes() =>
                    {
                        *until = end;
                    }
                    _ => {
                        if let Some(span) = open.take() {
                            layout.close(span, align64)?;
                        }
                        open = Some((matrix.file, matrix.offset & !(align64 - 1), end));
                    }
                }
                let (_, start, _) = open.expect("a span is open");
                layout.places[id.0 as usize] = Some(Place {
                    span: layout.spans.len() as u32,
                    at: u32::try_from(matrix.offset - start)
                        .map_err(|_| "has a layer of more than 4 GiB")?,
                });
            }
            if let Some(span) = open {
                layout.close(span, align64)?;
            }
            layout.groups.push(first..layout.spans.len() as u32);
        }
        layout.cut_head(net.matrix(net.head))?;
        Ok(layout)
    }

    fn close(
        &mut self,
        (file, start, end): (FileId, u64, u64),
        align: u64,
    ) -> Result<(), &'static str> {
        let len = (end - start).next_multiple_of(align);
        let len = u32::try_from(len)
            .ok()
            .filter(|len| *len < 1 << 31)
            .ok_or("has a layer of more than 2 GiB")?;
        self.slot_bytes = self.slot_bytes.max(len as usize).next_multiple_of(4096);
        self.spans.push(Extent {
            file,
            offset: start,
            len,
        });
        Ok(())
    }

    /// The head in parts of whole rows that fit a slot.
    fn cut_head(&mut self, head: &Matrix) -> Result<(), &'static str> {
        let first = self.spans.len() as u32;
        let align = u64::from(self.head_align);
        let room = self.slot_bytes as u64 - align;
        let rows = (room / u64::from(head.row_bytes)) as u32;
        if rows == 0 {
            return Err("has a head whose rows are longer than a layer");
        }
        self.head_rows = rows;
        let mut row = 0;
        while row < head.rows {
            let count = rows.min(head.rows - row);
            let from = head.offset + u64::from(row) * u64::from(head.row_bytes);
            let start = from & !(align - 1);
            let end = from + u64::from(count) * u64::from(head.row_bytes);
            self.spans.push(Extent {
                file: head.file,
                offset: start,
                len: (end - start).next_multiple_of(align) as u32,
            });
            row += count;
        }
        self.groups.push(first..self.spans.len() as u32);
        Ok(())
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.groups.len() - 1
    }

    /// Slots with which everything stays.
    pub fn slots_all(&self) -> u32 {
        self.spans.len() as u32
    }

    /// Slots with which a step can run at all: two layers, and two parts of the head.
    pub fn slots_least(&self) -> u32 {
        let widest = self.groups[..self.layers()].iter().map(Range::len).max();
        2 * widest.unwrap_or(1).max(1) as u32
    }

    /// Bytes of the tables that a store keeps beside its arena.
    pub fn table_bytes(&self) -> u64 {
        (self.spans.len() * (size_of::<Extent>() + 32) + self.places.len() * 16) as u64
    }
}

/// Whether a span is in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Home {
    Away,
    Coming,
    Here,
}

/// The weights.
pub struct Store {
    layout: Layout,
    arena: Arc<Arena>,
    backend: Backend,
    files: Vec<std::path::PathBuf>,
    /// By span.
    homes: Vec<(Home, SlotId)>,
    kept: Vec<bool>,
    /// By slot: the span in it.
    owners: Vec<Option<u32>>,
    /// Slots in use; those beyond have no memory.
    open: u32,
    /// By read: its span and how often it was tried; `None` when free.
    reads: Vec<Option<(u32, u32)>>,
    stop: &'static AtomicI32,
    /// Bytes that were read.
    pub bytes_read: u64,
    /// Time that computing waited for reads.
    pub stalled: Duration,
}

impl Store {
    /// Takes memory for `slots` spans. Nothing is read yet.
    ///
    /// # Errors
    /// What the operating system refuses.
    pub fn new(
        layout: Layout,
        slots: u32,
        source: Arc<Source>,
        options: &io::Options,
        stop: &'static AtomicI32,
    ) -> Result<Self, Error> {
        let files: Vec<_> = source.files().iter().map(|f| f.path().to_owned()).collect();
        let refused = |what| {
            let path = files[0].clone();
            move |error| Error::io(&path, what, error)
        };
        let slots = slots.min(layout.slots_all()).max(1);
        let arena = Arc::new(
            Arena::new(slots, layout.slot_bytes).map_err(refused("get memory for its weights"))?,
        );
        // Registered memory is pinned: it couldn't be given back when the budget falls.
        let options = io::Options {
            register: false,
            ..*options
        };
        let backend = Backend::new(source, Arc::clone(&arena), &options)
            .map_err(|error| refused("start reading it")(std::io::Error::other(error)))?;
        let Geometry { reads_max, .. } = backend.geometry();
        let spans = layout.spans.len();
        let mut kept = vec![false; spans];
        keep(&layout, slots, &mut kept);
        Ok(Self {
            homes: vec![(Home::Away, SlotId::NONE); spans],
            kept,
            owners: vec![None; slots as usize],
            open: slots,
            reads: vec![None; usize::from(reads_max)],
            arena,
            backend,
            files,
            layout,
            stop,
            bytes_read: 0,
            stalled: Duration::ZERO,
        })
    }

    /// Keeps to `slots` slots from now on, as far as it was made for so many: fewer spans stay, or more. What
    /// lies in the others is forgotten, and their memory is the system's.
    ///
    /// # Errors
    /// As [`Store::layer`]; the system doesn't take the memory.
    pub fn set_slots(&mut self, slots: u32) -> Result<(), Error> {
        let slots = slots.clamp(1, self.owners.len() as u32);
        keep(&self.layout, slots, &mut self.kept);
        let before = std::mem::replace(&mut self.open, slots);
        for slot in slots..before {
            let Some(span) = self.owners[slot as usize] else {
                continue;
            };
            // The device may be writing there.
            while self.homes[span as usize].0 == Home::Coming {
                self.wait(span)?;
            }
            self.homes[span as usize] = (Home::Away, SlotId::NONE);
            self.owners[slot as usize] = None;
        }
        if slots < before {
            self.arena.discard_from(SlotId(slots)).map_err(|error| {
                Error::io(&self.files[0], "give back memory of its weights", error)
            })?;
        }
        Ok(())
    }

    /// Bytes of weights that stay in memory.
    pub fn kept_bytes(&self) -> u64 {
        self.layout
            .spans
            .iter()
            .zip(&self.kept)
            .filter(|(_, kept)| **kept)
            .map(|(span, _)| u64::from(span.len))
            .sum()
    }

    /// The storage beneath, for its own report.
    pub fn storage(&self) -> &Backend {
        &self.backend
    }

    /// Waits until the layer is in memory, and begins to read the next one that isn't, upwards or
    /// downwards.
    ///
    /// # Errors
    /// A read that fails for good, or a stop.
    pub fn layer(&mut self, index: usize, up: bool) -> Result<(), Error> {
        self.bring(index)?;
        let away = |layer: &usize| {
            let group = self.layout.groups[*layer].clone();
            group.into_iter().any(|span| !self.kept[span as usize])
        };
        let next = if up {
            (index + 1..self.layout.layers()).find(away)
        } else {
            (0..index).rev().find(away)
        };
        if let Some(next) = next {
            self.start_group(next, index)?;
        }
        Ok(())
    }

    /// Shows `f` the head's rows, a part of them at a time, with the number of the first: each when it is
    /// in memory, while the next one is read.
    ///
    /// # Errors
    /// As [`Store::layer`].
    pub fn each_head_part(
        &mut self,
        head: &Matrix,
        mut f: impl FnMut(usize, Rows<'_>),
    ) -> Result<(), Error> {
        for span in self.layout.groups[self.layout.layers()].clone() {
            self.head_part(span)?;
            let (row, held) = self.head(span, head);
            f(row, held.rows());
        }
        Ok(())
    }

    /// Waits until a span of the head is in memory, and begins to read the next one.
    fn head_part(&mut self, span: u32) -> Result<(), Error> {
        let spans = self.layout.groups[self.layout.layers()].clone();
        while self.homes[span as usize].0 != Home::Here {
            if self.homes[span as usize].0 == Home::Away {
                self.start(span, std::slice::from_ref(&(span..span + 1)))?;
            }
            self.wait(span)?;
        }
        if span + 1 < spans.end && self.homes[span as usize + 1].0 == Home::Away {
            self.start(span + 1, std::slice::from_ref(&(span..span + 1)))?;
        }
        Ok(())
    }

    /// A matrix of the layer that is in memory.
    ///
    /// # Panics
    /// It isn't.
    pub fn matrix(&self, id: MatrixId, matrix: &Matrix) -> Held<'_> {
        let place = self.layout.places[id.0 as usize].expect("a layer's matrix has a place");
        self.held(place.span, place.at as usize, matrix, matrix.rows as usize)
    }

    /// Rows in a span of the head that is in memory, and the number of the first.
    fn head(&self, span: u32, head: &Matrix) -> (usize, Held<'_>) {
        let each = self.layout.head_rows as usize;
        let row = (span - self.layout.groups[self.layout.layers()].start) as usize * each;
        let rows = each.min(head.rows as usize - row);
        (row, self.head_rows(span, row, rows, head))
    }

    fn head_rows(&self, span: u32, row: usize, rows: usize, head: &Matrix) -> Held<'_> {
        let from = head.offset + row as u64 * u64::from(head.row_bytes);
        let at = (from - self.layout.spans[span as usize].offset) as usize;
        self.held(span, at, head, rows)
    }

    /// One row of the head, where its part stays in memory: the embedding of a tied model.
    pub fn head_row(&self, row: usize, head: &Matrix) -> Option<Held<'_>> {
        let spans = &self.layout.groups[self.layout.layers()];
        let part = row / self.layout.head_rows as usize;
        let span = spans.start + part as u32;
        if self.homes[span as usize].0 != Home::Here {
            return None;
        }
        Some(self.head_rows(span, row, 1, head))
    }

    fn held(&self, span: u32, at: usize, matrix: &Matrix, rows: usize) -> Held<'_> {
        let (home, slot) = self.homes[span as usize];
        assert_eq!(home, Home::Here, "the span is in memory");
        Held {
            bytes: self.arena.bytes(slot),
            from: at,
            len: rows * matrix.row_bytes as usize,
            ty: matrix.ty,
            cols: matrix.cols as usize,
        }
    }

    fn bring(&mut self, group: usize) -> Result<(), Error> {
        let spans = self.layout.groups[group].clone();
        for span in spans.clone() {
            while self.homes[span as usize].0 != Home::Here {
                if self.homes[span as usize].0 == Home::Away {
                    self.start(span, std::slice::from_ref(&spans))?;
                }
                self.wait(span)?;
            }
        }
        Ok(())
    }

    fn start_group(&mut self, group: usize, busy: usize) -> Result<(), Error> {
        let spans = self.layout.groups[group].clone();
        let busy = [self.layout.groups[busy].clone(), spans.clone()];
        for span in spans {
            if self.homes[span as usize].0 == Home::Away {
                self.start(span, &busy)?;
            }
        }
        Ok(())
    }

    /// Begins to read a span, if a slot and a read are free; `busy` spans stay.
    fn start(&mut self, span: u32, busy: &[Range<u32>]) -> Result<(), Error> {
        self.drain()?;
        let open = &self.owners[..self.open as usize];
        let free = open.iter().position(|owner| match owner {
            None => true,
            Some(owner) => {
                !self.kept[*owner as usize]
                    && !busy.iter().any(|spans| spans.contains(owner))
                    && self.homes[*owner as usize].0 == Home::Here
            }
        });
        let read = self.reads.iter().position(Option::is_none);
        let (Some(slot), Some(read)) = (free, read) else {
            return Ok(());
        };
        if let Some(old) = self.owners[slot].replace(span) {
            self.homes[old as usize] = (Home::Away, SlotId::NONE);
        }
        self.homes[span as usize] = (Home::Coming, SlotId(slot as u32));
        self.reads[read] = Some((span, 1));
        self.backend.start(self.command(span, read));
        Ok(())
    }

    fn command(&self, span: u32, read: usize) -> ReadCommand {
        ReadCommand {
            read: ReadId(read as u16),
            slot: self.homes[span as usize].1,
            piece: PieceId(span),
            extent: self.layout.spans[span as usize],
        }
    }

    /// Takes in reads that have ended.
    fn drain(&mut self) -> Result<(), Error> {
        while let Some((read, outcome)) = self.backend.poll() {
            let index = usize::from(read.0);
            let (span, tries) = self.reads[index].expect("a read that was started");
            let extent = self.layout.spans[span as usize];
            if outcome == ReadOutcome::Filled {
                self.reads[index] = None;
                self.homes[span as usize].0 = Home::Here;
                self.bytes_read += u64::from(extent.len);
                continue;
            }
            if tries == TRIES {
                let why = self.backend.reason(&extent).map_or_else(
                    || "the device refused".to_owned(),
                    |error| self.backend.explain(&error),
                );
                let path: &Path = &self.files[usize::from(extent.file.0)];
                return Err(Error::io(
                    path,
                    "read its weights",
                    std::io::Error::other(why),
                ));
            }
            self.reads[index] = Some((span, tries + 1));
            self.backend.start(self.command(span, index));
        }
        Ok(())
    }

    fn wait(&mut self, span: u32) -> Result<(), Error> {
        self.drain()?;
        if self.homes[span as usize].0 == Home::Here {
            return Ok(());
        }
        let signal = self.stop.load(Ordering::Relaxed);
        if signal != 0 {
            return Err(Error::Signal(signal));
        }
        let since = Instant::now();
        self.backend.wait(WAIT_US);
        self.stalled += since.elapsed();
        self.drain()
    }
}

/// Which spans stay: the head's, then evenly spread layers, as far as a ring of two layers is left.
fn keep(layout: &Layout, slots: u32, kept: &mut [bool]) {
    kept.fill(slots >= layout.slots_all());
    if slots >= layout.slots_all() {
        return;
    }
    let mut left = slots.saturating_sub(layout.slots_least());
    for span in layout.groups[layout.layers()].clone() {
        if left > 0 {
            kept[span as usize] = true;
            left -= 1;
        }
    }
    let layers = layout.layers() as u32;
    let each = layout.slots_least() / 2;
    let count = (left / each).min(layers);
    for (layer, group) in layout.groups[..layers as usize].iter().enumerate() {
        if layer as u32 * count % layers < count {
            group.clone().for_each(|span| kept[span as usize] = true);
        }
    }
}

/// Weights in memory, held there while this lives.
pub struct Held<'a> {
    bytes: SlotBytes<'a>,
    from: usize,
    len: usize,
    ty: leanstream_core::quant::QuantType,
    cols: usize,
}

impl Held<'_> {
    /// As kernels take them.
    pub fn rows(&self) -> Rows<'_> {
        Rows {
            ty: self.ty,
            cols: self.cols,
            bytes: &self.bytes[self.from..self.from + self.len],
        }
    }
}
