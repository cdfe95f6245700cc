//! Weights from flash into the arena: the backends of [`leanstream_core::port::Storage`].
//!
//! Open the files first ([`Source::open`]), since a plan needs their alignment; make the
//! [`Arena`] when the plan is known; then put a [`Backend`] over both. From then on nothing is
//! allocated.
//!
//! - `source`: the files, with O_DIRECT or without.
//! - `transfer`: one read from command to end; what both backends share.
//! - [`uring`], [`pread`]: the two ways to the kernel.
//! - [`throttle`], [`fault`]: middleware over any storage, for trials and tests.
//! - [`probe`]: how fast is this device?
//! - `report`: errors, notices and counters, as values; `reasons`: which read failed why.

pub mod fault;
mod hold;
pub mod pread;
pub mod probe;
mod reasons;
mod report;
mod source;
pub mod throttle;
mod transfer;
pub mod uring;

use std::sync::Arc;
use std::sync::atomic::AtomicI32;

use leanstream_core::port::{Geometry, ReadCommand, ReadOutcome, Storage};
use leanstream_core::units::{Extent, ReadId};

use crate::arena::Arena;
use fault::{Fault, FaultPlan};
use throttle::{Limits, Throttle};

pub use hold::{Clock, Monotonic};
pub use report::{Cause, Errno, Notice, OpenError, ReadError, Stats};
pub use source::{Direct, Source, SourceFile};

/// Which way to the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Kind {
    /// io_uring where it works, threads elsewhere.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Threads.
    Pread,
}

/// How to read.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Which way to the kernel.
    pub kind: Kind,
    /// Reads in flight, at least 1 and at most 4096.
    pub depth: u16,
    /// Pin the arena for io_uring. Saves time per read; makes the whole arena resident at once.
    pub register: bool,
    /// Slow reads down.
    pub throttle: Option<Limits>,
    /// Make reads fail.
    pub faults: Option<FaultPlan>,
    /// Slow nothing down any more once this isn't 0.
    pub stop: Option<&'static AtomicI32>,
}

/// The depth that [`Options::default`] asks for.
pub const DEPTH_DEFAULT: u16 = 8;

/// More reads in flight than any device we know makes use of.
pub const DEPTH_MAX: u16 = 4096;

impl Default for Options {
    fn default() -> Self {
        Self {
            kind: Kind::Auto,
            depth: DEPTH_DEFAULT,
            register: true,
            throttle: None,
            faults: None,
            stop: None,
        }
    }
}

/// One of the ways to the kernel.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "one value a process; a box would only add a jump"
)]
enum Device {
    Uring(uring::Uring),
    Pread(pread::Pread),
}

impl Storage for Device {
    fn geometry(&self) -> Geometry {
        match self {
            Self::Uring(device) => device.geometry(),
            Self::Pread(device) => device.geometry(),
        }
    }

    fn start(&mut self, command: ReadCommand) {
        match self {
            Self::Uring(device) => device.start(command),
            Self::Pread(device) => device.start(command),
        }
    }

    fn poll(&mut self) -> Option<(ReadId, ReadOutcome)> {
        match self {
            Self::Uring(device) => device.poll(),
            Self::Pread(device) => device.poll(),
        }
    }

    fn wait(&mut self, timeout_us: u32) {
        match self {
            Self::Uring(device) => device.wait(timeout_us),
            Self::Pread(device) => device.wait(timeout_us),
        }
    }
}

/// A device with the middleware that was asked for.
#[derive(Debug)]
enum Stack {
    Plain(Device),
    Throttled(Throttle<Device>),
    Faulty(Throttle<Fault<Device>>),
}

/// The storage that a run uses.
#[derive(Debug)]
pub struct Backend {
    stack: Stack,
    source: Arc<Source>,
    /// Told when asked, once each.
    notices: [Option<Notice>; 2],
    late_refusal_told: bool,
}

impl Backend {
    /// Open the way to the kernel that `options` name, for reads of `source` into `arena`.
    ///
    /// # Errors
    /// [`OpenError::NoRing`] when io_uring was asked for by name and is refused;
    /// [`OpenError::Thread`] when reader threads can't be started.
    ///
    /// # Panics
    /// When the depth is out of range, or the arena's slots aren't multiples of the source's
    /// alignment.
    pub fn new(
        source: Arc<Source>,
        arena: Arc<Arena>,
        options: &Options,
    ) -> Result<Self, OpenError> {
        assert!(
            (1..=DEPTH_MAX).contains(&options.depth),
            "{} reads in flight",
            options.depth
        );
        assert!(
            arena.slot_bytes().is_multiple_of(source.align() as usize),
            "slots of {} bytes for a device aligned to {}",
            arena.slot_bytes(),
            source.align()
        );
        let mut notices = [None; 2];
        let refused = source.first_refused();
        notices[0] = refused.map(|(file, errno)| Notice::BufferedAtOpen { file, errno });
        let device = match options.kind {
            Kind::Pread => open_pread(&source, &arena, options)?,
            Kind::Uring => {
                open_uring(&source, &arena, options).map_err(|errno| OpenError::NoRing { errno })?
            }
            Kind::Auto => match open_uring(&source, &arena, options) {
                Ok(device) => device,
                Err(errno) => {
                    notices[1] = Some(Notice::NoRing { errno });
                    open_pread(&source, &arena, options)?
                }
            },
        };
        let limits = options.throttle.unwrap_or_default();
        let stack = match options.faults {
            Some(plan) => {
                let faulty = Fault::new(device, arena, plan, Monotonic::default());
                Stack::Faulty(
                    Throttle::new(faulty, limits, Monotonic::default()).until(options.stop),
                )
            }
            None if limits.is_none() => Stack::Plain(device),
            None => Stack::Throttled(
                Throttle::new(device, limits, Monotonic::default()).until(options.stop),
            ),
        };
        Ok(Self {
            stack,
            late_refusal_told: refused.is_some(),
            source,
            notices,
        })
    }

    /// The files that are read.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// How reads go, for summaries: `uring+direct`, `pread+direct`, `uring+buffered(EINVAL)`, ...
    pub fn io_mode(&self) -> String {
        let way = match self.device() {
            Device::Uring(_) => "uring",
            Device::Pread(_) => "pread",
        };
        format!("{way}+{}", self.source.mode())
    }

    /// Something to tell the user that hasn't been told yet. Ask after opening and now and then
    /// while running; each is given once, and asking costs next to nothing.
    pub fn take_notice(&mut self) -> Option<Notice> {
        if let Some(notice) = self.notices.iter_mut().find_map(Option::take) {
            return Some(notice);
        }
        if self.late_refusal_told || self.stats().refused == 0 {
            return None;
        }
        self.late_refusal_told = true;
        let (file, errno) = self.source.first_refused()?;
        Some(Notice::BufferedAtRead { file, errno })
    }

    /// Why the latest read of `extent` failed, if it did. Known until its [`ReadId`] is used again.
    pub fn reason(&self, extent: &Extent) -> Option<ReadError> {
        let injected = match &self.stack {
            Stack::Faulty(throttle) => throttle.inner().reason(extent),
            Stack::Plain(_) | Stack::Throttled(_) => None,
        };
        injected.or_else(|| match self.device() {
            Device::Uring(device) => device.reason(extent),
            Device::Pread(device) => device.reason(extent),
        })
    }

    /// A read's failure in words, with the file's path.
    pub fn explain(&self, error: &ReadError) -> String {
        let path = self.source.file(error.file).path().display();
        format!("{path}: {error}")
    }

    /// Totals so far. With a fault injector these are what the backend beneath it did.
    pub fn stats(&self) -> Stats {
        match self.device() {
            Device::Uring(device) => device.stats(),
            Device::Pread(device) => device.stats(),
        }
    }

    /// True when io_uring reads into a registered arena.
    pub fn is_registered(&self) -> bool {
        match self.device() {
            Device::Uring(device) => device.is_registered(),
            Device::Pread(_) => false,
        }
    }

    fn device(&self) -> &Device {
        match &self.stack {
            Stack::Plain(device) => device,
            Stack::Throttled(throttle) => throttle.inner(),
            Stack::Faulty(throttle) => throttle.inner().inner(),
        }
    }
}

fn open_uring(
    source: &Arc<Source>,
    arena: &Arc<Arena>,
    options: &Options,
) -> Result<Device, Errno> {
    let (source, arena) = (Arc::clone(source), Arc::clone(arena));
    let Options {
        depth,
        register,
        faults,
        ..
    } = *options;
    uring::Uring::new(source, arena, depth, register, faults).map(Device::Uring)
}

fn open_pread(
    source: &Arc<Source>,
    arena: &Arc<Arena>,
    options: &Options,
) -> Result<Device, OpenError> {
    let (source, arena) = (Arc::clone(source), Arc::clone(arena));
    pread::Pread::new(source, arena, options.depth, options.faults).map(Device::Pread)
}

impl Storage for Backend {
    fn geometry(&self) -> Geometry {
        self.device().geometry()
    }

    fn start(&mut self, command: ReadCommand) {
        match &mut self.stack {
            Stack::Plain(storage) => storage.start(command),
            Stack::Throttled(storage) => storage.start(command),
            Stack::Faulty(storage) => storage.start(command),
        }
    }

    fn poll(&mut self) -> Option<(ReadId, ReadOutcome)> {
        match &mut self.stack {
            Stack::Plain(storage) => storage.poll(),
            Stack::Throttled(storage) => storage.poll(),
            Stack::Faulty(storage) => storage.poll(),
        }
    }

    fn wait(&mut self, timeout_us: u32) {
        match &mut self.stack {
            Stack::Plain(storage) => storage.wait(timeout_us),
            Stack::Throttled(storage) => storage.wait(timeout_us),
            Stack::Faulty(storage) => storage.wait(timeout_us),
        }
    }
}
