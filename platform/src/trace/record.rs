//! Writes a trace while a run goes on: through one buffer of fixed size, without allocating, and into
//! a file that gets its name only when it is whole.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

use leanstream_core::trace::{
    HAS_IMPORTANCE, HAS_RANKS, HAS_SCORES, HEADER_BYTES, Header, RANKS_ADDED, SCORE_SCALE,
    STAGES_MAX, tag,
};

use crate::aside::Aside;
use crate::error::Error;

/// Bytes that are gathered before they are written.
const BUFFER_BYTES: usize = 256 << 10;

/// What is recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Meta<'m> {
    /// Layers that have units.
    pub layers: u32,
    /// Units a layer, 65536 at most.
    pub units: u32,
    /// Bytes of a unit on flash.
    pub unit_bytes: u32,
    /// SHA-256 of the model.
    pub source_sha256: [u8; 32],
    /// The model's name; 56 bytes of it are kept.
    pub name: &'m str,
    /// Whether the gate's pre-activations are kept (a byte for each unit and token).
    pub scores: bool,
    /// Whether [ranks](Recorder::ranks) are kept.
    pub ranks: bool,
}

/// What a read was for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadKind {
    /// Units that the running layer waits for.
    Demanded = 0,
    /// Units that a stage foresees.
    Ahead = 1,
    /// Another part of the model.
    Dense = 2,
}

/// A trace being written. Methods never fail: what goes wrong is told by [`finish`](Self::finish), and
/// nothing more is written. Without a call of it the file is taken away.
#[derive(Debug)]
pub struct Recorder {
    aside: Aside,
    file: File,
    buffer: Vec<u8>,
    /// Units by size.
    order: Vec<u16>,
    header: Header,
    failed: Option<io::Error>,
    /// Bytes before the buffer's.
    written: u64,
    /// Where the running token begins.
    token_start: u64,
    /// The layer that has to come next.
    layer_next: u32,
    compute_ns: u64,
}

impl Recorder {
    /// Begins a trace of `path`; the header is written when it ends.
    ///
    /// # Errors
    /// [`Error::Io`] if no file can be made there.
    ///
    /// # Panics
    /// If units don't have numbers of 16 bits.
    pub fn begin(path: &Path, meta: &Meta<'_>) -> Result<Self, Error> {
        assert!(meta.units <= 1 << 16, "units are numbered by 16 bits");
        let mut name = [0; 56];
        let mut len = meta.name.len().min(name.len());
        while !meta.name.is_char_boundary(len) {
            len -= 1;
        }
        name[..len].copy_from_slice(&meta.name.as_bytes()[..len]);
        let header = Header {
            flags: HAS_IMPORTANCE
                | if meta.scores { HAS_SCORES } else { 0 }
                | if meta.ranks { HAS_RANKS } else { 0 },
            layers: meta.layers,
            units: meta.units,
            unit_bytes: meta.unit_bytes,
            tokens: 0,
            compute_ns: 0,
            source_sha256: meta.source_sha256,
            name,
        };
        let (aside, file) =
            Aside::create(path).map_err(|source| Error::io(path, "write the trace", source))?;
        // One record more than the buffer's limit fits, so that it never grows.
        let record = 16 + 2 * meta.units as usize + header.set_bytes();
        let mut recorder = Self {
            aside,
            file,
            buffer: Vec::with_capacity(BUFFER_BYTES + record),
            order: Vec::with_capacity(if meta.ranks { meta.units as usize } else { 0 }),
            header,
            failed: None,
            written: 0,
            token_start: 0,
            layer_next: meta.layers,
            compute_ns: 0,
        };
        recorder.buffer.extend(recorder.header.encode());
        Ok(recorder)
    }

    /// Bytes that it holds, for the ledger.
    pub fn memory_bytes(&self) -> usize {
        self.buffer.capacity() + 2 * self.order.capacity()
    }

    /// Whether [ranks](Self::ranks) are kept.
    pub fn ranked(&self) -> bool {
        self.header.flags & HAS_RANKS != 0
    }

    /// A token begins, so many microseconds after the first one.
    ///
    /// # Panics
    /// If a layer of the token before is missing.
    pub fn token(&mut self, time_us: u64) {
        assert_eq!(
            self.layer_next, self.header.layers,
            "a token ends with its last layer"
        );
        self.token_start = self.position();
        self.layer_next = 0;
        self.buffer.push(tag::TOKEN);
        self.buffer.extend(time_us.to_le_bytes());
        self.header.tokens += 1;
        self.flush_if_full();
    }

    /// Stage `stage` foresees these units of a layer to come, in any order.
    ///
    /// # Panics
    /// If the layer is over, or there is no such stage or unit.
    pub fn stage(&mut self, layer: u32, stage: u8, predicted: &[u16]) {
        assert!(
            layer >= self.layer_next && layer < self.header.layers && stage < STAGES_MAX,
            "stage {stage} of layer {layer}"
        );
        self.buffer.push(tag::STAGE);
        self.buffer.extend(layer.to_le_bytes());
        self.buffer.push(stage);
        self.set(predicted);
        self.flush_if_full();
    }

    /// What `layer` used: its gate's pre-activations by unit (none are needed where no scores are
    /// kept), the active units in order, and the importance of each.
    ///
    /// # Panics
    /// If another layer has to come, or the slices don't fit together.
    pub fn layer(&mut self, layer: u32, gate: &[f32], active: &[u16], importance: &[f32]) {
        assert_eq!(layer, self.layer_next, "layers come in order");
        assert_eq!(active.len(), importance.len(), "one importance a unit");
        assert!(
            active.is_sorted_by(|a, b| a < b),
            "active units come in order"
        );
        self.layer_next += 1;
        self.buffer.push(tag::LAYER);
        self.buffer.extend(layer.to_le_bytes());
        self.set(active);
        self.buffer.extend(importance.iter().map(|&i| level(i)));
        if self.header.flags & HAS_SCORES != 0 {
            assert_eq!(gate.len(), self.header.units as usize, "one gate a unit");
            let square = gate.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>();
            let rms = (square / gate.len() as f64).sqrt() as f32;
            let scale = if rms > 0.0 { SCORE_SCALE / rms } else { 0.0 };
            self.buffer.extend(
                gate.iter()
                    .map(|g| (g * scale).round().clamp(-127.0, 127.0) as i8 as u8),
            );
        }
        self.flush_if_full();
    }

    /// How large the units of a layer are, one size a unit, as `of` has it: a stage of looking ahead,
    /// [`RANKS_CHOICE`](leanstream_core::trace::RANKS_CHOICE) or [`RANKS_ADDED`].
    ///
    /// # Panics
    /// If no ranks are kept, there is no such `of`, or the layer's turn is over or hasn't come.
    pub fn ranks(&mut self, layer: u32, of: u8, sizes: &[f32]) {
        assert!(self.ranked() && of <= RANKS_ADDED);
        let turn = match of {
            ..STAGES_MAX => layer >= self.layer_next && layer < self.header.layers,
            _ => layer + 1 == self.layer_next,
        };
        assert!(turn, "ranks {of} of layer {layer}");
        assert_eq!(sizes.len(), self.header.units as usize, "one size a unit");
        self.order.clear();
        self.order.extend(0..=(sizes.len() - 1) as u16);
        self.order.sort_unstable_by(|a, b| {
            let size = |unit: &u16| sizes[usize::from(*unit)];
            size(b).total_cmp(&size(a)).then(a.cmp(b))
        });
        self.buffer.push(tag::RANKS);
        self.buffer.extend(layer.to_le_bytes());
        self.buffer.push(of);
        let start = self.buffer.len();
        self.buffer.resize(start + sizes.len(), 0);
        for (larger, unit) in self.order.iter().enumerate() {
            self.buffer[start + usize::from(*unit)] = (larger * 256 / sizes.len()) as u8;
        }
        self.flush_if_full();
    }

    /// So many nanoseconds went into computing layers of this token, without waiting.
    pub fn computed(&mut self, nanoseconds: u64) {
        self.compute_ns += nanoseconds;
    }

    /// A read has ended that was started `time_us` after the first token and took `took_us`.
    pub fn read(&mut self, time_us: u64, took_us: u32, bytes: u32, kind: ReadKind) {
        self.buffer.push(tag::READ);
        self.buffer.extend(time_us.to_le_bytes());
        self.buffer.extend(took_us.to_le_bytes());
        self.buffer.extend(bytes.to_le_bytes());
        self.buffer.push(kind as u8);
        self.flush_if_full();
    }

    /// Ends the trace and gives the file its name. A token that was broken off is left out.
    ///
    /// # Errors
    /// [`Error::Io`] with the first thing that went wrong since the beginning.
    pub fn finish(mut self) -> Result<(), Error> {
        self.flush();
        let failed = self.failed.take();
        failed
            .map_or_else(|| self.seal(), Err)
            .map_err(|source| Error::io(self.aside.aside(), "write the trace", source))
    }

    fn seal(&mut self) -> io::Result<()> {
        if self.layer_next != self.header.layers {
            self.written = self.token_start;
            self.header.tokens -= 1;
            self.file.set_len(self.written)?;
            self.file.seek(SeekFrom::Start(self.written))?;
        }
        let layers = u64::from(self.header.tokens) * u64::from(self.header.layers);
        let average = self.compute_ns.checked_div(layers).unwrap_or(0);
        self.header.compute_ns = u32::try_from(average).unwrap_or(u32::MAX);
        self.file.write_all(&[tag::END])?;
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&self.header.encode())?;
        self.aside.finish(&self.file)
    }

    fn position(&self) -> u64 {
        self.written + self.buffer.len() as u64
    }

    fn set(&mut self, units: &[u16]) {
        let start = self.buffer.len();
        self.buffer.resize(start + self.header.set_bytes(), 0);
        for &unit in units {
            assert!(
                u32::from(unit) < self.header.units,
                "there is no unit {unit}"
            );
            self.buffer[start + usize::from(unit) / 8] |= 1 << (unit % 8);
        }
    }

    fn flush_if_full(&mut self) {
        if self.buffer.len() >= BUFFER_BYTES {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if self.failed.is_none() {
            self.failed = self.file.write_all(&self.buffer).err();
        }
        self.written += self.buffer.len() as u64;
        self.buffer.clear();
    }
}

/// An importance as it is kept: 2^((q - 100) / 12), with 0 for nothing.
fn level(importance: f32) -> u8 {
    if importance > 0.0 {
        (100.0 + 12.0 * importance.log2()).round().clamp(1.0, 255.0) as u8
    } else {
        0
    }
}

const _: () = assert!(HEADER_BYTES < BUFFER_BYTES, "the header is gathered too");

#[cfg(test)]
mod tests {
    use super::*;
    use leanstream_core::trace::{Record, Trace};
    use std::fs;
    use std::path::PathBuf;

    const META: Meta<'static> = Meta {
        layers: 2,
        units: 20,
        unit_bytes: 1160,
        source_sha256: [7; 32],
        name: "made up",
        scores: true,
        ranks: true,
    };

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("leanstream-trace-{}-{name}", std::process::id()))
    }

    fn token(recorder: &mut Recorder, time_us: u64) {
        let gate: Vec<f32> = (0..20).map(|unit| unit as f32 - 10.0).collect();
        recorder.token(time_us);
        for layer in 0..2 {
            recorder.stage(layer, 1, &[19, 0, 8]);
            recorder.ranks(layer, 1, &gate);
            recorder.layer(layer, &gate, &[0, 7, 19], &[1.0, 2.0, 0.0]);
        }
        recorder.read(time_us + 3, 80, 4096, ReadKind::Ahead);
    }

    #[test]
    fn what_is_recorded_is_read_again() {
        let path = path("whole");
        let mut recorder = Recorder::begin(&path, &META).expect("a file can be made");
        let capacity = recorder.memory_bytes();
        for time in 0..3000 {
            token(&mut recorder, time);
            recorder.computed(500);
        }
        assert_eq!(recorder.memory_bytes(), capacity, "the buffer never grows");
        assert!(!path.exists(), "it gets its name at the end");
        recorder.finish().expect("it can be written");
        let file = fs::read(&path).expect("it is there");
        fs::remove_file(&path).expect("it can go");
        let trace = Trace::parse(&file).expect("it is sound");
        assert_eq!(trace.header().tokens, 3000);
        assert_eq!(trace.header().compute_ns, 250);
        assert_eq!(trace.header().name(), "made up");
        let records: Vec<Record<'_>> = trace.records().take(8).collect();
        let Record::Stage { predicted, .. } = records[1] else {
            panic!("{:?}", records[1]);
        };
        assert_eq!(predicted.iter().collect::<Vec<_>>(), [0, 8, 19]);
        let Record::Layer {
            active,
            importance,
            scores,
            ..
        } = records[3]
        else {
            panic!("{:?}", records[3]);
        };
        assert_eq!(active.iter().collect::<Vec<_>>(), [0, 7, 19]);
        assert_eq!(importance, [100, 112, 0]);
        // The root mean square of -10..=9 is 5.79.
        let scores: Vec<i8> = scores.iter().map(|&s| s as i8).collect();
        assert_eq!((scores[0], scores[10], scores[19]), (-28, 0, 25));
        let Record::Ranks {
            layer: 0,
            of: 1,
            ranks,
        } = records[2]
        else {
            panic!("{:?}", records[2]);
        };
        // The gate grows with the unit: the last one is the largest of 20.
        assert_eq!((ranks[19], ranks[18], ranks[0]), (0, 12, 243));
        assert_eq!(
            records[7],
            Record::Read {
                time_us: 3,
                took_us: 80,
                bytes: 4096,
                kind: 1
            }
        );
    }

    #[test]
    fn a_token_that_was_broken_off_is_left_out() {
        let path = path("broken");
        let mut recorder = Recorder::begin(&path, &META).expect("a file can be made");
        token(&mut recorder, 0);
        recorder.token(5);
        recorder.layer(0, &[0.0; 20], &[3], &[1.0]);
        recorder.finish().expect("it can be written");
        let file = fs::read(&path).expect("it is there");
        fs::remove_file(&path).expect("it can go");
        assert_eq!(Trace::parse(&file).expect("it is sound").header().tokens, 1);
    }

    #[test]
    fn what_was_not_finished_leaves_nothing() {
        let path = path("dropped");
        let recorder = Recorder::begin(&path, &META).expect("a file can be made");
        let partial = recorder.aside.aside().to_owned();
        assert!(partial.exists());
        drop(recorder);
        assert!(!partial.exists() && !path.exists());
    }

    #[test]
    fn a_full_disk_is_told_at_the_end() {
        let Ok(full) = File::options().write(true).open("/dev/full") else {
            return;
        };
        let path = path("full");
        let mut recorder = Recorder::begin(&path, &META).expect("a file can be made");
        recorder.file = full;
        for time in 0..3000 {
            token(&mut recorder, time);
        }
        let error = recorder.finish().expect_err("the disk is full");
        assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("trace"));
        assert!(!path.exists());
    }
}
