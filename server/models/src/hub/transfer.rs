//! Gets the files of a plan into the cache.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};

use anyhow::{Context, Result, anyhow};
use sha2::{Digest, Sha256};
use ureq::http::{HeaderMap, header};

use super::client::{Client, HubError};
use super::plan::{Plan, Progress, TEXT_BYTES, Wanted};
use crate::machine::disk_free;

/// How often a failed download of a file is retried.
const RETRIES: usize = 3;

/// Bytes that are hashed at a time.
const HASHED_BYTES: usize = 1 << 20;

/// Gets the files of `plan` that are missing, and checks them.
///
/// # Errors
/// If the network fails, or a file is not what the hub says.
pub fn get(
    client: &Client,
    plan: &Plan,
    report: &mut dyn FnMut(&Progress<'_>),
) -> Result<(), Failure> {
    let (mut done, total) = (0_u64, plan.bytes());
    for file in &plan.files {
        if !plan.has(file) {
            let mut of_file = |bytes| {
                let done = done.saturating_add(bytes);
                report(&Progress { file: &file.name, done, total });
            };
            get_file(client, plan, file, &mut of_file)?;
        }
        done = done.saturating_add(file.size.unwrap_or(0));
        report(&Progress { file: &file.name, done, total });
    }
    Ok(())
}

/// Why a file did not arrive.
pub enum Failure {
    /// The hub or the connection.
    Hub(HubError),
    /// Something on this machine, or a content that is not what the hub says.
    Other(anyhow::Error),
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        Self::Hub(error)
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Other(error)
    }
}

fn get_file(
    client: &Client,
    plan: &Plan,
    file: &Wanted,
    report: &mut dyn FnMut(u64),
) -> Result<(), Failure> {
    let context = || format!("{} of {}", file.name, plan.repo_id);
    let folder = &plan.folder;
    let _lock = folder.lock(&file.blob).with_context(context)?;
    let mut part = folder.open_part(&file.blob).map_err(HubError::Cache)?;
    let mut retries = 0;
    while let Err(error) = append(client, plan, file, &mut part, u64::MAX, report) {
        if !error.is_passing() || retries == RETRIES {
            if matches!(error, HubError::Promise(_)) {
                let _ = part.set_len(0);
            }
            return Err(error.into());
        }
        retries += 1;
        tracing::debug!(file = file.name, %error, retries, "download continues");
        client.pause(retries)?;
    }
    match verify(client, file, &part) {
        Ok(()) => {}
        Err(Failure::Other(problem)) => {
            // It must not be continued.
            let _ = fs::remove_file(folder.part(&file.blob));
            return Err(problem.context(format!("{} was deleted again", context())).into());
        }
        // What has arrived stays.
        Err(failure) => return Err(failure),
    }
    part.sync_all().map_err(HubError::Cache)?;
    folder.finish(&file.blob).map_err(HubError::Cache)?;
    folder.link(&plan.sha, &file.path, &file.blob).map_err(HubError::Cache)?;
    Ok(())
}

/// Gets the first `bytes` of a file, or all of a shorter one; returns the unfinished file, which a download continues.
///
/// # Errors
/// If the network fails, or another process downloads it.
pub fn get_beginning(
    client: &Client,
    plan: &Plan,
    file: &Wanted,
    bytes: u64,
) -> Result<File, Failure> {
    let folder = &plan.folder;
    let _lock =
        folder.lock(&file.blob).with_context(|| format!("{} of {}", file.name, plan.repo_id))?;
    let mut part = folder.open_part(&file.blob).map_err(HubError::Cache)?;
    let bytes = bytes.min(file.size.unwrap_or(u64::MAX));
    if part.metadata().map_err(HubError::Cache)?.len() < bytes {
        append(client, plan, file, &mut part, bytes, &mut |_| {})?;
    }
    Ok(part)
}

/// Appends what is missing of `file` to `part`, or stops when that has `enough` bytes.
fn append(
    client: &Client,
    plan: &Plan,
    file: &Wanted,
    part: &mut File,
    enough: u64,
    report: &mut dyn FnMut(u64),
) -> Result<(), HubError> {
    let mut here = part.metadata().map_err(HubError::Cache)?.len();
    if file.size.is_some_and(|size| here >= size) {
        if file.size == Some(here) {
            match verify(client, file, part) {
                Ok(()) => return Ok(()),
                Err(Failure::Hub(error)) => return Err(error),
                Err(Failure::Other(_)) => {}
            }
        }
        part.set_len(0).map_err(HubError::Cache)?;
        here = 0;
        if file.size == Some(0) {
            return Ok(());
        }
    }
    let path = format!("/{}/resolve/{}/{}", plan.repo_id, plan.sha, escaped(&file.name));
    let mut reply = client.get_from(&path, here)?;
    let (from, whole) = match reply.status {
        206 => content_range(&reply.headers).ok_or_else(|| {
            HubError::Promise("the hub's reply has no valid Content-Range".into())
        })?,
        200 => (0, content_length(&reply.headers)),
        416 if here > 0 => {
            part.set_len(0).map_err(HubError::Cache)?;
            return Err(HubError::Connection(ErrorKind::UnexpectedEof.into()));
        }
        status => return Err(HubError::Status(status)),
    };
    if from == 0 && here > 0 {
        part.set_len(0).map_err(HubError::Cache)?;
        here = 0;
    }
    if from != here {
        let problem = format!("the hub sends bytes from {from} on instead of {here}");
        return Err(HubError::Promise(problem));
    }
    let size = match (file.size, whole) {
        (Some(size), Some(whole)) if size != whole => {
            let problem = format!("the hub sends {whole} bytes, and says that it has {size}");
            return Err(HubError::Promise(problem));
        }
        (Some(size), _) | (None, Some(size)) => size,
        (None, None) if !file.is_weights() => TEXT_BYTES,
        (None, None) => {
            let problem = "the hub does not say how large the file is";
            return Err(HubError::Promise(problem.into()));
        }
    };
    if !file.is_weights() && size > TEXT_BYTES {
        let problem = format!("it has {size} bytes, which is more than the limit of {TEXT_BYTES}");
        return Err(HubError::Promise(problem));
    }
    let (left, is_known) = (size.saturating_sub(here), file.size.or(whole).is_some());
    let free = disk_free(plan.folder.root()).unwrap_or(u64::MAX);
    if is_known && left > free {
        let problem = format!("the disk has {free} bytes free, and {left} are to be downloaded");
        return Err(HubError::Cache(std::io::Error::new(ErrorKind::StorageFull, problem)));
    }
    report(here);
    let read = client.read(&mut reply.body, left, &mut |bytes| {
        part.write_all(bytes).map_err(HubError::Cache)?;
        here += bytes.len() as u64;
        report(here);
        if here < enough { Ok(()) } else { Err(HubError::Enough) }
    });
    match read {
        Err(HubError::Enough) => return Ok(()),
        read => read?,
    }
    if is_known && here < size {
        let problem = format!("it ended after {here} of {size} bytes");
        let ended = std::io::Error::new(ErrorKind::UnexpectedEof, problem);
        return Err(HubError::Connection(ended));
    }
    Ok(())
}

/// Checks the content of `part` against what the hub says.
///
/// # Errors
/// [`Failure::Other`] if it is another one. [`Failure::Hub`] says nothing of it: it was not read to its end.
fn verify(client: &Client, file: &Wanted, part: &File) -> Result<(), Failure> {
    let bytes = part.metadata().map_err(HubError::Cache)?.len();
    if let Some(size) = file.size
        && bytes != size
    {
        return Err(anyhow!("it has {bytes} bytes, the hub says {size}").into());
    }
    if let Some(expected) = &file.sha256 {
        let found = sha256(client, part)?;
        if found != *expected {
            return Err(anyhow!("its SHA-256 is {found}, the hub says {expected}").into());
        }
    }
    Ok(())
}

/// SHA-256 of a file in hex digits. Hashing a large file takes minutes, and a stop ends it, too.
fn sha256(client: &Client, mut file: &File) -> Result<String, HubError> {
    use std::io::Seek;

    file.rewind().map_err(HubError::Cache)?;
    let mut sha = Sha256::new();
    let mut bytes = vec![0; HASHED_BYTES];
    loop {
        client.refuse_if_stopped()?;
        match file.read(&mut bytes).map_err(HubError::Cache)? {
            0 => return Ok(hex::encode(sha.finalize())),
            read => sha.update(&bytes[..read]),
        }
    }
}

/// The first byte of a reply with a range, and the bytes of the whole.
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let text = headers.get(header::CONTENT_RANGE)?.to_str().ok()?;
    let (range, whole) = text.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, whole.parse().ok()))
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// `path` with the characters escaped that an address cannot have.
fn escaped(path: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~/".contains(&byte);
    let escape = |byte: u8| match plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    path.bytes().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use steersman_files::{FileName, FilePath};

    use super::*;
    use crate::hub::client::Times;
    use crate::hub::{Hub, Stop};

    /// A file was hashed to its end, and a download whose last file it was succeeded after an operator had stopped it.
    #[test]
    fn a_stop_ends_the_check_of_a_file_and_keeps_what_has_arrived() {
        let hub = Hub {
            endpoint: "http://127.0.0.1:1".into(),
            cache: "none".into(),
            token: None,
            offline: true,
        };
        let stop = Stop::default();
        let client = Client::new(&hub, Times::default(), &stop);
        let commit = FileName::new("0123456789abcdef0123456789abcdef01234567").unwrap();
        let plan = Plan::new(Path::new("none"), "owner/tiny", commit).unwrap();
        let wanted = Wanted {
            name: "model.safetensors".into(),
            path: FilePath::new("model.safetensors").unwrap(),
            size: Some(4),
            sha256: Some(hex::encode(Sha256::digest("text"))),
            blob: FileName::new("blob").unwrap(),
        };
        let mut part = tempfile::tempfile().unwrap();
        part.write_all(b"text").unwrap();
        let check = |part: &mut File| append(&client, &plan, &wanted, part, u64::MAX, &mut |_| {});
        assert!(check(&mut part).is_ok(), "it is complete");
        stop.stop();
        assert!(matches!(check(&mut part), Err(HubError::Stopped)));
        assert_eq!(part.metadata().unwrap().len(), 4);
        let verified = verify(&client, &wanted, &part);
        assert!(matches!(verified, Err(Failure::Hub(HubError::Stopped))));
    }
}
