//go:build unix

package pgtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// guard is a shell script that outlives this process by a moment. Its input is a
// pipe that only this process has the other end of, so it ends when this process
// does, even by SIGKILL. Before that each line is the process to stop then, and its
// children that are frozen.
//
// PostgreSQL stops at once on SIGQUIT and takes its children along; after a
// SIGKILL they and the shared memory would stay.
const guard = `
trap '' HUP INT QUIT TERM
family=
while read -r line; do family=$line; done
if [ -n "$family" ]; then
	pid=${family%% *}
	kill -CONT $family
	kill -QUIT "$pid"
	tries=0
	while kill -0 "$pid" && [ "$tries" -lt 500 ]; do
		sleep 0.02
		tries=$((tries + 1))
	done
	kill -KILL "$pid"
fi
rm -rf "$1" || { sleep 1; rm -rf "$1"; }
`

// A home is a temporary folder and the process that lives in it, at most one at
// a time. Both end with this process at the latest.
type home struct {
	path  string
	owner *syscall.Credential // nil for who runs the tests

	guard *exec.Cmd
	tell  *os.File // to the guard; it takes over when this is closed

	pid    int   // 0 when no process runs
	frozen []int // its children that a pause has stopped
}

func newHome() (*home, error) {
	owner, err := findOwner()
	if err != nil {
		return nil, err
	}
	path, err := os.MkdirTemp(tempDir(owner != nil), "pgtest-")
	if err != nil {
		return nil, err
	}
	h := &home{path: path, owner: owner}
	if err := errors.Join(h.own(path), h.startGuard()); err != nil {
		return nil, errors.Join(err, os.RemoveAll(path))
	}
	return h, nil
}

// findOwner returns who runs the servers, nil for the user that we are.
func findOwner() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		return nil, fmt.Errorf("user postgres: %w: the servers refuse to run as root: %w", errMissing, err)
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, err
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
}

// tempDir returns the folder for homes: in memory where there is room, which
// makes databases several times faster to create, unless TMPDIR says where. /tmp
// replaces what others cannot get to, as a folder of t.TempDir, and a path that
// is too long for a socket in it.
func tempDir(others bool) string {
	const longest = 60 // of the 107 bytes, our own part and the socket's take 45
	dir := memoryDir()
	if dir == "" || os.Getenv("TMPDIR") != "" {
		dir = filepath.Clean(os.TempDir())
	}
	if len(dir) > longest || (others && !openToAll(dir)) {
		return "/tmp"
	}
	return dir
}

// openToAll says whether every user can get to what is in a folder.
func openToAll(dir string) (open bool) {
	for {
		info, err := os.Stat(dir)
		if err != nil || info.Mode()&0o001 == 0 {
			return false
		}
		if dir == filepath.Dir(dir) {
			return true
		}
		dir = filepath.Dir(dir)
	}
}

// own gives a file to the owner of the home.
func (h *home) own(path string) error {
	if h.owner == nil {
		return nil
	}
	return os.Chown(path, int(h.owner.Uid), int(h.owner.Gid))
}

func (h *home) startGuard() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	h.guard = exec.Command("/bin/sh", "-c", guard, "sh", h.path)
	h.guard.Dir = "/"
	h.guard.Env = []string{"PATH=" + os.Getenv("PATH") + ":/usr/bin:/bin"} // whatever a test made of it
	h.guard.Stdin = r
	h.guard.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // what ends our process group spares it
	if err := h.guard.Start(); err != nil {
		return errors.Join(err, w.Close())
	}
	h.tell = w
	return nil
}

func (h *home) log() string { return filepath.Join(h.path, "log") }

// start starts the process of this home. Its output goes to the log.
func (h *home) start(exe string, args ...string) error {
	if h.running() {
		return fmt.Errorf("start %s: process %d still runs", exe, h.pid)
	}
	log, err := os.OpenFile(h.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(exe, args...)
	cmd.Dir = h.path
	// No PGDATA, PGPORT and the like, and messages in English.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: h.owner, Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	h.pid = cmd.Process.Pid
	// From here on it is waited for by its number, with wait4: cmd.Wait would
	// need a goroutine for as long as it runs.
	return errors.Join(cmd.Process.Release(), h.tellGuard())
}

func (h *home) tellGuard() error {
	var line strings.Builder
	if h.pid != 0 {
		fmt.Fprint(&line, h.pid)
		for _, pid := range h.frozen {
			fmt.Fprint(&line, " ", pid)
		}
	}
	_, err := h.tell.WriteString(line.String() + "\n")
	return err
}

// running says whether the process runs.
func (h *home) running() bool {
	running, _ := h.poll()
	return running
}

// poll says whether the process runs, and how it ended if that is news.
func (h *home) poll() (running bool, status syscall.WaitStatus) {
	if h.pid == 0 {
		return false, 0
	}
	pid, err := syscall.Wait4(h.pid, &status, syscall.WNOHANG, nil)
	if pid == 0 || errors.Is(err, syscall.EINTR) {
		return true, 0
	}
	h.pid, h.frozen = 0, nil
	_ = h.tellGuard() // it fails only if the guard is gone
	return false, status
}

// wait returns when the process has ended, an error if it has not in time.
func (h *home) wait() (syscall.WaitStatus, error) {
	for deadline := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		running, status := h.poll()
		if !running {
			return status, nil
		}
		if time.Now().After(deadline) {
			return 0, fmt.Errorf("process %d still runs after %v", h.pid, patience)
		}
	}
}

// run runs a program of this home to its end.
func (h *home) run(exe string, args ...string) error {
	if err := h.start(exe, args...); err != nil {
		return err
	}
	status, err := h.wait()
	if err == nil && status.ExitStatus() != 0 {
		err = fmt.Errorf("exit status %d", status.ExitStatus())
	}
	if err != nil {
		return fmt.Errorf("%s: %w", exe, err)
	}
	return nil
}

// stop sends the process a signal and waits for its end. None is not an error.
func (h *home) stop(sig syscall.Signal) error {
	h.resume()
	if !h.running() {
		return nil
	}
	if err := syscall.Kill(h.pid, sig); err != nil {
		return err
	}
	_, err := h.wait()
	return err
}

// pause freezes the process and its children.
func (h *home) pause() error {
	if !h.running() {
		return errors.New("it does not run")
	}
	// First the one that starts the others.
	if err := syscall.Kill(h.pid, syscall.SIGSTOP); err != nil {
		return err
	}
	var err error
	if h.frozen, err = childrenOf(h.pid); err != nil {
		return err
	}
	for _, pid := range h.frozen {
		// One that has just ended needs no pause.
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil && !errors.Is(err, syscall.ESRCH) {
			return err
		}
	}
	return h.tellGuard()
}

// resume ends a pause, and does nothing where there is none.
func (h *home) resume() {
	if !h.running() {
		return
	}
	for _, pid := range append(h.frozen, h.pid) {
		_ = syscall.Kill(pid, syscall.SIGCONT) // whoever is gone needs none
	}
	h.frozen = nil
	_ = h.tellGuard() // it fails only if the guard is gone
}

// childrenOf lists the children of a process.
func childrenOf(parent int) ([]int, error) {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("/proc: %w", errMissing)
	}
	var children []int
	for _, file := range files {
		stat, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		// PID (NAME) STATE PARENT ...: the name may hold anything.
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if len(fields) < 2 || fields[1] != strconv.Itoa(parent) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			return nil, err
		}
		children = append(children, pid)
	}
	return children, nil
}

// remove ends the process and removes the folder. The guard does both, as it
// would if this process had been killed, so every test proves that it can.
func (h *home) remove() {
	h.resume()
	h.tell.Close()
	// The guard sees the process until we have taken note of its end. What is
	// left over after all fails no test.
	_, _ = h.wait()
	_ = h.guard.Wait()
}
