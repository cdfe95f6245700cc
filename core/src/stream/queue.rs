//! Slots in order of worth: 256 intrusive lists and a map of which are not empty. Every operation is
//! O(1); the links live in the slots, so nothing is allocated.

use super::policy::Worth;
use super::tables::Slot;
use crate::units::{PieceId, SlotId};

/// The list beside the worths: pieces that the running step can use now. Never evicted.
const ARRIVED: usize = 256;
const LISTS: usize = 257;
/// In no list: filling, or in submitted work.
const OUT: u16 = u16::MAX;
const END: u32 = u32::MAX;

/// The lists, over slots lent by the caller.
pub struct Queue<'m> {
    slots: &'m mut [Slot],
    heads: [u32; LISTS],
    tails: [u32; LISTS],
    occupied: [u64; 4],
    spare: u32,
}

impl<'m> Queue<'m> {
    /// All slots empty, lowest numbers first.
    pub fn new(slots: &'m mut [Slot]) -> Self {
        assert!(slots.len() < END as usize, "slot numbers are 32 bits");
        let mut queue = Self {
            slots,
            heads: [END; LISTS],
            tails: [END; LISTS],
            occupied: [0; 4],
            spare: 0,
        };
        for slot in 0..queue.slots.len() {
            queue.slots[slot] = Slot::default();
            queue.push(SlotId(slot as u32), Worth::EMPTY);
        }
        queue
    }

    /// Slots in all.
    #[inline]
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there are no slots at all.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// How many slots have a worth below [`Worth::AHEAD`]: what read-ahead may still take.
    #[inline]
    pub fn spare(&self) -> u32 {
        self.spare
    }

    /// The piece in `slot`, or about to be.
    #[inline]
    pub fn piece(&self, slot: SlotId) -> Option<PieceId> {
        let piece = self.slots[slot.0 as usize].piece;
        (piece != END).then_some(PieceId(piece))
    }

    /// Says which piece `slot` holds.
    #[inline]
    pub fn set_piece(&mut self, slot: SlotId, piece: Option<PieceId>) {
        self.slots[slot.0 as usize].piece = piece.map_or(END, |piece| piece.0);
    }

    /// The worth under which `slot` is listed, if it is.
    #[inline]
    pub fn worth(&self, slot: SlotId) -> Option<Worth> {
        u8::try_from(self.slots[slot.0 as usize].list)
            .ok()
            .map(Worth)
    }

    /// The least worth there is.
    #[inline]
    pub fn least(&self) -> Option<Worth> {
        let word = self.occupied.iter().position(|&word| word != 0)?;
        Some(Worth(
            (word as u32 * 64 + self.occupied[word].trailing_zeros()) as u8,
        ))
    }

    /// Longest listed under `worth`.
    #[inline]
    pub fn first(&self, worth: Worth) -> Option<SlotId> {
        let slot = self.heads[usize::from(worth.0)];
        (slot != END).then_some(SlotId(slot))
    }

    /// Last listed under `worth`.
    #[inline]
    pub fn last(&self, worth: Worth) -> Option<SlotId> {
        let slot = self.tails[usize::from(worth.0)];
        (slot != END).then_some(SlotId(slot))
    }

    /// Lists `slot` last under `worth`. It must be in no list.
    #[inline]
    pub fn push(&mut self, slot: SlotId, worth: Worth) {
        let list = usize::from(worth.0);
        self.link(slot, list);
        self.occupied[list / 64] |= 1 << (list % 64);
        self.spare += u32::from(worth < Worth::AHEAD);
    }

    /// Lists `slot` among the arrived ones. It must be in no list.
    #[inline]
    pub fn push_arrived(&mut self, slot: SlotId) {
        self.link(slot, ARRIVED);
    }

    /// The one that arrived first.
    #[inline]
    pub fn first_arrived(&self) -> Option<SlotId> {
        let slot = self.heads[ARRIVED];
        (slot != END).then_some(SlotId(slot))
    }

    /// Takes `slot` out of its list.
    #[inline]
    pub fn remove(&mut self, slot: SlotId) {
        let Slot {
            prev, next, list, ..
        } = self.slots[slot.0 as usize];
        assert_ne!(list, OUT, "slot {} is in a list", slot.0);
        let list = usize::from(list);
        match prev {
            END => self.heads[list] = next,
            prev => self.slots[prev as usize].next = next,
        }
        match next {
            END => self.tails[list] = prev,
            next => self.slots[next as usize].prev = prev,
        }
        self.slots[slot.0 as usize].list = OUT;
        if list != ARRIVED {
            if self.heads[list] == END {
                self.occupied[list / 64] &= !(1 << (list % 64));
            }
            self.spare -= u32::from(list < usize::from(Worth::AHEAD.0));
        }
    }

    #[inline]
    fn link(&mut self, slot: SlotId, list: usize) {
        let tail = self.tails[list];
        let entry = &mut self.slots[slot.0 as usize];
        assert_eq!(entry.list, OUT, "slot {} is in one list at most", slot.0);
        entry.prev = tail;
        entry.next = END;
        entry.list = list as u16;
        match tail {
            END => self.heads[list] = slot.0,
            tail => self.slots[tail as usize].next = slot.0,
        }
        self.tails[list] = slot.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lowest_worth_first_then_oldest() {
        let mut slots = [Slot::default(); 5];
        let mut queue = Queue::new(&mut slots);
        assert_eq!((queue.least(), queue.spare()), (Some(Worth::EMPTY), 5));
        for (slot, worth) in [(0, 200), (1, 7), (2, 64), (3, 7), (4, 255)] {
            queue.remove(SlotId(slot));
            queue.push(SlotId(slot), Worth(worth));
        }
        assert_eq!(queue.spare(), 3);
        let mut order = [0; 5];
        for place in &mut order {
            let slot = queue.first(queue.least().unwrap()).unwrap();
            queue.remove(slot);
            *place = slot.0;
        }
        assert_eq!(order, [1, 3, 2, 0, 4]);
        assert_eq!((queue.least(), queue.spare()), (None, 0));
    }

    #[test]
    fn removes_from_the_middle_and_the_ends() {
        let mut slots = [Slot::default(); 4];
        let mut queue = Queue::new(&mut slots);
        queue.remove(SlotId(1));
        queue.remove(SlotId(3));
        assert_eq!(
            (queue.first(Worth::EMPTY), queue.last(Worth::EMPTY)),
            (Some(SlotId(0)), Some(SlotId(2)))
        );
        queue.push_arrived(SlotId(3));
        queue.push_arrived(SlotId(1));
        assert_eq!(
            (queue.first_arrived(), queue.worth(SlotId(3))),
            (Some(SlotId(3)), None)
        );
        queue.remove(SlotId(0));
        queue.remove(SlotId(2));
        assert_eq!(queue.least(), None);
    }

    #[test]
    #[should_panic(expected = "in one list at most")]
    fn a_slot_is_in_one_list_at_most() {
        let mut slots = [Slot::default(); 1];
        let mut queue = Queue::new(&mut slots);
        queue.push(SlotId(0), Worth::LEAST);
    }
}
