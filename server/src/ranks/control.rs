//! What a parent and the process of a rank tell each other: lines of JSON over a pair of sockets, of which the process has one as
//! its standard input. The parent may pass the socket that the server listens to.

use std::io::{self, BufRead, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use steersman_engine::config::{Config, ModelConfig};

use super::Over;
use crate::hub::Found;

/// What a process is told first.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Assignment {
    /// Which rank it is, from 0 on.
    pub rank: usize,
    /// Number of ranks.
    pub count: usize,
    /// What carries their arrays.
    pub over: Over,
    /// The address at which the first rank gives the others its log.
    pub log: String,
    /// The key with which they prove that they belong together.
    pub key: String,
    /// The model of which it computes a part.
    pub model: Part,
}

/// A model of which a process computes a part.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Part {
    /// The folder or GGUF file.
    pub folder: PathBuf,
    /// How it is computed.
    pub config: ModelConfig,
    /// Where digests of weights are kept.
    pub data_dir: PathBuf,
}

impl Part {
    /// The model in `found`, as `config` says.
    pub fn of(config: &Config, found: &Found, data_dir: &Path) -> Self {
        let (folder, config) = (found.folder.clone(), config.model.clone());
        Self { folder, config, data_dir: data_dir.to_owned() }
    }
}

/// What a process is told later.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToProcess {
    /// The server stops, as by a signal.
    Stop,
    /// The configuration is read again, as by a signal.
    Reload,
    /// Another rank has ended, and this one is killed soon. Clients are told why.
    End(String),
}

/// What a process tells its parent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromProcess {
    /// A sign of life.
    Beat {
        /// How long it has computed without an end, in milliseconds; `None` while it waits for work.
        computing: Option<u64>,
    },
    /// It has loaded its part of the model.
    Ready {
        /// What all ranks must have in common.
        digest: String,
    },
    /// It cannot do what it was told, and would not the next time: why.
    Failed(String),
}

/// A line of a message.
pub fn line(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("a message has string keys only");
    line.push(b'\n');
    line
}

/// The next message of `input`; `None` at its end.
///
/// # Errors
/// If it cannot be read, or is no message.
pub fn read<T: DeserializeOwned>(input: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = String::new();
    if input.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_str(&line)?))
}

/// Sends one byte and, with it, a listening socket if there is one.
///
/// # Errors
/// The system's error, if it refuses.
pub fn send_listener(control: &UnixStream, listener: Option<&TcpListener>) -> io::Result<()> {
    let fds = listener.map(AsFd::as_fd);
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut passed = SendAncillaryBuffer::new(&mut space);
    if let Some(fd) = &fds {
        passed.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
    }
    sendmsg(control, &[IoSlice::new(&[0])], &mut passed, SendFlags::empty())?;
    Ok(())
}

/// Receives what [`send_listener`] has sent. Must be the first that is read.
///
/// # Errors
/// The system's error, if it refuses.
pub fn receive_listener(control: &UnixStream) -> io::Result<Option<TcpListener>> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let (mut passed, mut byte) = (RecvAncillaryBuffer::new(&mut space), [1]);
    let flags = RecvFlags::empty();
    let received = recvmsg(control, &mut [IoSliceMut::new(&mut byte)], &mut passed, flags)?;
    if received.bytes != 1 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut fds = passed.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    Ok(fds.next().and_then(|mut fds| fds.next()).map(TcpListener::from))
}

#[cfg(test)]
mod tests {
    use std::io::{BufReader, Write};

    use super::*;

    #[test]
    fn a_listening_socket_and_messages_arrive_in_order() {
        let (parent, process) = UnixStream::pair().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        send_listener(&parent, Some(&listener)).unwrap();
        (&parent).write_all(&line(&ToProcess::End("rank 1: gone".into()))).unwrap();
        let passed = receive_listener(&process).unwrap().expect("it was sent");
        assert_eq!(passed.local_addr().unwrap(), listener.local_addr().unwrap());
        let input = &mut BufReader::new(&process);
        assert_eq!(read(input).unwrap(), Some(ToProcess::End("rank 1: gone".into())));
        (&parent).write_all(b"{}\n").unwrap();
        assert!(read::<ToProcess>(input).is_err());
        drop(parent);
        assert_eq!(read::<ToProcess>(input).unwrap(), None);
    }

    #[test]
    fn a_process_may_get_no_socket() {
        let (parent, process) = UnixStream::pair().unwrap();
        send_listener(&parent, None).unwrap();
        assert!(receive_listener(&process).unwrap().is_none());
        drop(parent);
        assert!(receive_listener(&process).is_err());
    }
}
