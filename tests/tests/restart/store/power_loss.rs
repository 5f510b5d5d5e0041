//! Power loss, which unlike a killed process also loses what the operating system has not
//! written yet.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use redb::StorageBackend;
use steersman_engine::config::StoreConfig;
use steersman_engine::internals::store::{
    Fingerprint, Part, PartKind, RedbStore, StoreEnv, WallClock,
};
use steersman_tests::{Random, scaled};

use super::{MB, loads, longest, part};

const MODEL: Fingerprint = [9; 32];
/// A disk writes this many bytes as a whole or not at all.
const SECTOR: usize = 512;
/// Most operations of the disk before the power fails. A run takes about 230, so two of three fail
/// while saving, and some while closing.
const OPERATIONS: usize = 340;
const SAVES: u32 = 12;

/// A change that the disk may write in any order, or lose, until the next sync.
#[derive(Debug)]
enum Unsynced {
    Length(usize),
    Sector { offset: usize, bytes: Vec<u8> },
}

impl Unsynced {
    fn apply(&self, disk: &mut Vec<u8>) {
        match self {
            Self::Length(length) => disk.resize(*length, 0),
            Self::Sector { offset, bytes } => {
                let end = offset + bytes.len();
                disk.resize(disk.len().max(end), 0);
                disk[*offset..end].copy_from_slice(bytes);
            }
        }
    }
}

/// A simulated disk with a write cache.
#[derive(Debug, Default)]
struct Disk {
    synced: Vec<u8>,
    /// What the running process reads: `synced` with all of `unsynced`.
    current: Vec<u8>,
    unsynced: Vec<Unsynced>,
    /// Changes and syncs until the power fails.
    left: usize,
}

impl Disk {
    /// Counts one operation.
    fn operate(&mut self) -> io::Result<()> {
        self.left = self.left.checked_sub(1).ok_or_else(|| io::Error::other("no power"))?;
        Ok(())
    }

    fn change(&mut self, change: Unsynced) {
        change.apply(&mut self.current);
        self.unsynced.push(change);
    }

    /// Cuts the power: any of the unsynced changes are lost, so later ones may survive earlier ones.
    fn lose_power(&mut self, random: &mut Random) {
        let survive = random.below(5);
        for change in self.unsynced.drain(..) {
            if random.below(4) < survive {
                change.apply(&mut self.synced);
            }
        }
        self.current = self.synced.clone();
    }
}

#[derive(Debug, Clone, Default)]
struct SharedDisk(Arc<Mutex<Disk>>);

impl SharedDisk {
    /// Drops a file whose magic number was never written, which a store in a real file sets aside.
    fn drop_unfinished(&self) {
        let mut disk = self.0.lock().unwrap();
        if disk.current.iter().take(9).all(|byte| *byte == 0) {
            *disk = Disk { left: disk.left, ..Disk::default() };
        }
    }
}

impl StorageBackend for SharedDisk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().current.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let disk = self.0.lock().unwrap();
        let bytes = disk.current.get(offset as usize..offset as usize + out.len());
        out.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut disk = self.0.lock().unwrap();
        disk.operate()?;
        disk.change(Unsynced::Length(len as usize));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut disk = self.0.lock().unwrap();
        disk.operate()?;
        disk.synced = disk.current.clone();
        disk.unsynced.clear();
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut disk = self.0.lock().unwrap();
        disk.operate()?;
        let (mut offset, mut data) = (offset as usize, data);
        while !data.is_empty() {
            let (sector, rest) = data.split_at(data.len().min(SECTOR - offset % SECTOR));
            disk.change(Unsynced::Sector { offset, bytes: sector.to_vec() });
            offset += sector.len();
            data = rest;
        }
        Ok(())
    }
}

fn open(disk: &SharedDisk, budget_bytes: u64) -> Option<RedbStore> {
    let disk = disk.clone();
    let env = StoreEnv {
        open: Arc::new(move |builder, _| {
            disk.drop_unfinished();
            builder.create_with_backend(disk.clone())
        }),
        ..StoreEnv::default()
    };
    let config = StoreConfig { budget_bytes, ..StoreConfig::default() };
    RedbStore::open_in(env, Path::new("/nowhere/state.redb"), MODEL, &config).ok()
}

/// KV of two blocks and a state, of 0 to 40 kB.
fn numbered(i: u32) -> (Vec<u32>, Vec<Part>) {
    let tokens: Vec<u32> = (1000 * i..1000 * i + 100).collect();
    let bytes = [0, 900, 9_000, 40_000][i as usize % 4];
    let parts = vec![
        part(MODEL, &tokens[..64], PartKind::Kv, bytes / 2),
        part(MODEL, &tokens, PartKind::Kv, 1000),
        part(MODEL, &tokens, PartKind::State, bytes),
    ];
    (tokens, parts)
}

/// Saves until the power fails, and returns the number of saves, the flushed ones first.
fn save_until_power_fails(disk: &SharedDisk, first: u32, budget_bytes: u64) -> u32 {
    let Some(store) = open(disk, budget_bytes) else { return 0 };
    for i in 0..SAVES {
        store.save(numbered(first + i).1);
        if store.flush().is_err() {
            return i;
        }
    }
    SAVES
}

/// The power fails while the store creates its file, saves, or closes, again and again on the same
/// disk. The next start finds every flushed save, whole saves only, and a store that works.
///
/// This law found a `flush` that returned before a failed write had turned saving off, and so
/// reported a lost save as saved.
#[test]
fn store_survives_power_loss_at_any_write() {
    let (mut flushed_saves, mut unflushed_saves) = (0, 0);
    for seed in 0..scaled(20) as u64 {
        let disk = SharedDisk::default();
        let mut random = Random(seed);
        let mut flushed = Vec::new();
        for round in 0..6 {
            disk.0.lock().unwrap().left = random.below(OPERATIONS);
            let first = round * SAVES;
            let count = save_until_power_fails(&disk, first, 64 * MB);
            flushed.extend(first..first + count);
            disk.0.lock().unwrap().lose_power(&mut random);

            disk.0.lock().unwrap().left = usize::MAX;
            let at = format!("round {round} of seed {seed}");
            let store = open(&disk, 64 * MB).expect(&at);
            assert_eq!(store.report().counts.damaged_parts, 0, "{at}");
            for i in 0..(round + 1) * SAVES {
                let (tokens, parts) = numbered(i);
                let found = longest(&store, &tokens, 100, true);
                assert!(found.is_some() || !flushed.contains(&i), "{at}: save {i} is lost");
                // A save is one transaction: if its state is here, all of it is.
                if found.is_some() {
                    assert!(found == Some(100) && loads(&store, &parts), "{at}: save {i}");
                    unflushed_saves += usize::from(!flushed.contains(&i));
                } else {
                    assert!(parts.iter().all(|part| !store.contains(&part.key)), "{at}: save {i}");
                }
            }
            flushed_saves += count;
            if random.below(2) == 0 {
                let (_, parts) = numbered(10_000 + round);
                store.save(parts.clone());
                store.flush().expect(&at);
                assert!(loads(&store, &parts), "{at}");
            }
        }
    }
    eprintln!(
        "{flushed_saves} flushed saves, {unflushed_saves} times a save not flushed was found"
    );
    assert!(flushed_saves > 250);
}

/// With a budget for about five saves, each transaction evicts too.
#[test]
fn full_store_survives_power_loss_at_any_write() {
    let (mut found_saves, mut lost_power) = (0, 0);
    for seed in 10_000..10_000 + scaled(30) as u64 {
        let disk = SharedDisk::default();
        let mut random = Random(seed);
        for round in 0..4 {
            disk.0.lock().unwrap().left = random.below(OPERATIONS);
            let count = save_until_power_fails(&disk, round * SAVES, MB / 4);
            lost_power += u32::from(count < SAVES);
            disk.0.lock().unwrap().lose_power(&mut random);

            disk.0.lock().unwrap().left = usize::MAX;
            let at = format!("round {round} of seed {seed}");
            let store = open(&disk, MB / 4).expect(&at);
            assert_eq!(store.report().counts.damaged_parts, 0, "{at}");
            for i in 0..(round + 1) * SAVES {
                let (tokens, parts) = numbered(i);
                if longest(&store, &tokens, 100, true).is_some() {
                    assert!(loads(&store, &parts), "{at}: save {i}");
                    found_saves += 1;
                }
            }
            if count > 0 {
                let last = numbered(round * SAVES + count - 1).1;
                assert!(loads(&store, &last), "{at}: the last flushed save is lost");
            }
        }
    }
    eprintln!("{found_saves} saves found, the power failed {lost_power} times while saving");
    assert!(found_saves > 200 && lost_power > 40);
}

/// A failed write turned saving off until the next start.
#[test]
fn saving_resumes_when_the_disk_has_room_again() {
    let disk = SharedDisk::default();
    disk.0.lock().unwrap().left = usize::MAX;
    let seconds = Arc::new(AtomicU64::new(1_800_000_000));
    let (time, storage) = (seconds.clone(), disk.clone());
    let env = StoreEnv {
        clock: WallClock::new(move || {
            UNIX_EPOCH + Duration::from_secs(time.load(Ordering::Relaxed))
        }),
        open: Arc::new(move |builder, _| builder.create_with_backend(storage.clone())),
    };
    let config = StoreConfig { budget_bytes: MB, ..StoreConfig::default() };
    let path = Path::new("/nowhere/state.redb");
    let store = RedbStore::open_in(env, path, MODEL, &config).unwrap();
    let mut next = 0;
    let mut save = || {
        next += 1;
        store.save(numbered(next).1);
        (store.flush().is_ok(), numbered(next).1)
    };
    let (saved, first) = save();
    assert!(saved);
    for _ in 0..3 {
        disk.0.lock().unwrap().left = 0;
        assert!(!save().0);
        disk.0.lock().unwrap().left = usize::MAX;
        seconds.fetch_add(30, Ordering::Relaxed);
        assert!(!save().0, "too early to try again");
        assert!(store.report().off.is_some());
        seconds.fetch_add(30, Ordering::Relaxed);
        // This one is dropped, but it ends the pause.
        assert!(save().0);
        assert_eq!(store.report().off, None);
        let (saved, parts) = save();
        assert!(saved && loads(&store, &parts) && loads(&store, &first));
    }
}
