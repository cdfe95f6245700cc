//! The store beside the dense engine, in the one loop of [`crate::stream::drive`].

use super::choice::Choice;
use super::retain::Retain;
use super::store::{ATTEMPTS_MAX, Delivery, Store};
use super::tables::{Foreseen, Item};
use crate::port::{Compute, ReadCommand, ReadOutcome, Storage};
use crate::stream::Fault;
use crate::stream::drive::Side;
use crate::units::{PieceId, ReadId, SlotId};

/// What a backend has to say of a sparse step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UnitEvent {
    /// The running step has [chosen](Units::choice).
    Chosen,
    /// This group is computed.
    GroupEnded(u32),
    /// The next layer's units are [foreseen](Units::foreseen).
    Foreseen,
}

/// A compute backend that knows sparse steps. A step chooses, gets its groups as they become ready,
/// and ends when it is told that it is settled. Nothing here blocks.
pub trait Units: Compute {
    /// The next event of the running step.
    fn poll_units(&mut self) -> Option<UnitEvent>;
    /// What the running step chose.
    fn choice(&self) -> Choice<'_>;
    /// Computes a group. Several may be handed over before the first has ended.
    fn group(&mut self, number: u32, items: &[Item]);
    /// All `groups` groups of the running step have ended: adds them up and ends the step.
    fn settle(&mut self, groups: u32);
    /// Gives up the running step, if it is a sparse one: it ends, with a result of no use.
    fn abandon(&mut self);
    /// The running step waits for `missing` units: the time may be used to foresee the next layer's.
    fn idle(&mut self, missing: u32);
    /// The units that were foreseen, likeliest first, and their bank.
    fn foreseen(&self) -> (u32, &[Foreseen]);
    /// Copies a unit out of a staging slot; whether its checksum holds.
    fn deliver(&mut self, staging: SlotId, delivery: Delivery) -> bool;
}

/// The store with its place among the storage's reads and the arena's slots.
pub struct Beside<'s, 'm, R> {
    /// The store.
    pub store: &'s mut Store<'m, R>,
    /// Its reads are numbered from here on.
    pub first_read: u16,
    /// Its staging slots: one a read, from here on.
    pub first_staging: u32,
    /// Nothing is started any more.
    pub stopped: bool,
}

impl<'s, 'm, R> Beside<'s, 'm, R> {
    /// For a pass, or between two.
    pub fn new(store: &'s mut Store<'m, R>, first_read: u16, first_staging: u32) -> Self {
        Self {
            store,
            first_read,
            first_staging,
            stopped: false,
        }
    }
}

impl<R: Retain, C: Units> Side<C> for Beside<'_, '_, R> {
    fn turn(&mut self, storage: &mut impl Storage, compute: &mut C) -> bool {
        let mut moved = false;
        while let Some(event) = compute.poll_units() {
            moved = true;
            if self.stopped {
                continue;
            }
            match event {
                UnitEvent::Chosen => self.store.choose(compute.choice()),
                UnitEvent::GroupEnded(group) => self.store.group_ended(group),
                UnitEvent::Foreseen => {
                    let (bank, units) = compute.foreseen();
                    self.store.foresee(bank, units.iter().copied());
                }
            }
        }
        if self.stopped {
            return moved;
        }
        // Reads first: the device should not wait for the groups to be handed over.
        while let Some(request) = self.store.poll_read() {
            moved = true;
            storage.start(ReadCommand {
                read: ReadId(self.first_read + request.read.0),
                slot: SlotId(self.first_staging + u32::from(request.read.0)),
                piece: PieceId(u32::MAX),
                extent: request.extent,
            });
        }
        while let Some(group) = self.store.poll_group() {
            moved = true;
            compute.group(group, self.store.items(group));
        }
        if self.store.settled() {
            moved = true;
            let groups = self.store.group_count();
            self.store.finish();
            compute.settle(groups);
        } else if !moved && !compute.busy() && self.store.groups_left() > 0 {
            compute.idle(self.store.missing());
        }
        moved
    }

    fn read_ended(&mut self, read: ReadId, outcome: ReadOutcome, compute: &mut C) -> bool {
        let Some(own) = read.0.checked_sub(self.first_read) else {
            return false;
        };
        let staging = SlotId(self.first_staging + u32::from(own));
        self.store.read_ended(ReadId(own), outcome, |delivery| {
            compute.deliver(staging, delivery)
        });
        true
    }

    fn reads_flying(&self) -> u32 {
        self.store.reads_flying()
    }

    fn fault(&self) -> Option<Fault> {
        self.store.fault().map(|fault| Fault::Unit {
            bank: fault.bank,
            index: fault.index,
            attempts: ATTEMPTS_MAX,
            lost: fault.lost,
        })
    }

    fn stop(&mut self, compute: &mut C) {
        self.stopped = true;
        compute.abandon();
        self.store.abandon();
    }
}
