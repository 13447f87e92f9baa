// Command allocate answers what kube-scheduler's allocator would do, without a cluster.
//
// It reads a JSON case a line on standard input and writes a JSON answer a line, in the same order. The allocator is
// the scheduler's own package, k8s.io/dynamic-resource-allocation/structured, with the features that are on in a
// default Kubernetes 1.37 (AllocatorFeatures in pkg/scheduler/framework/plugins/dynamicresources).
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// Default gates of Kubernetes 1.37 (pkg/features/kube_features.go).
var features = structured.Features{
	AdminAccess:            true,
	PrioritizedList:        true,
	PartitionableDevices:   true,
	DeviceTaints:           true,
	DeviceBindingAndStatus: true,
	ConsumableCapacity:     true,
}

// question is one node, what a pod asks for, and what others have.
type question struct {
	Node   v1.Node                      `json:"node"`
	Slices []*resourceapi.ResourceSlice `json:"slices"`
	// Classes by name.
	Classes classes `json:"classes"`
	// Claims to allocate for one pod, in the pod's order.
	Claims []*resourceapi.ResourceClaim `json:"claims"`
	// Others are claims with an allocation.
	Others []*resourceapi.ResourceClaim `json:"others"`
}

// answer: verdict is "allocated", "none" (not on this node), "error" (the scheduler gives the pod up on all nodes)
// or "timeout". Devices are the results claim by claim.
type answer struct {
	Verdict string     `json:"verdict"`
	Error   string     `json:"error,omitempty"`
	Devices [][]result `json:"devices,omitempty"`
}

type result struct {
	Request string `json:"request"`
	Driver  string `json:"driver"`
	Pool    string `json:"pool"`
	Device  string `json:"device"`
}

type classes map[string]*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	var all []*resourceapi.DeviceClass
	for _, class := range c {
		all = append(all, class)
	}
	return all, nil
}

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if class, found := c[name]; found {
		return class, nil
	}
	return nil, fmt.Errorf("no DeviceClass %q", name)
}

func main() {
	limit := flag.Duration("timeout", 10*time.Second, "for one case; the scheduler's own is 10 s a node")
	flag.Parse()
	if err := answerAll(os.Stdin, os.Stdout, *limit); err != nil {
		fmt.Fprintln(os.Stderr, "allocate:", err)
		os.Exit(2)
	}
}

func answerAll(in io.Reader, out io.Writer, limit time.Duration) error {
	cache := cel.NewCache(10000, cel.Features{EnableConsumableCapacity: true})
	lines := bufio.NewReaderSize(in, 1<<20)
	writer := bufio.NewWriter(out)
	encoder := json.NewEncoder(writer)
	for number := 1; ; number++ {
		line, err := lines.ReadBytes('\n')
		if len(line) > 1 {
			var asked question
			if err := json.Unmarshal(line, &asked); err != nil {
				return fmt.Errorf("line %d: %w", number, err)
			}
			if err := encoder.Encode(allocate(&asked, cache, limit)); err != nil {
				return err
			}
			if err := writer.Flush(); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func allocate(asked *question, cache *cel.Cache, limit time.Duration) answer {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for _, claim := range asked.Claims {
		setDefaults(claim)
	}
	allocator, err := structured.NewAllocator(ctx, features, taken(asked.Others), asked.Classes, asked.Slices, cache)
	if err != nil {
		return answer{Verdict: "error", Error: err.Error()}
	}
	found, err := allocator.Allocate(ctx, &asked.Node, asked.Claims)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return answer{Verdict: "timeout"}
	case errors.Is(err, structured.ErrFailedAllocationOnNode):
		return answer{Verdict: "none", Error: err.Error()}
	case err != nil:
		return answer{Verdict: "error", Error: err.Error()}
	case found == nil && len(asked.Claims) > 0:
		return answer{Verdict: "none"}
	}
	devices := make([][]result, len(found))
	for i, allocation := range found {
		for _, one := range allocation.Devices.Results {
			devices[i] = append(devices[i], result{one.Request, one.Driver, one.Pool, one.Device})
		}
	}
	return answer{Verdict: "allocated", Devices: devices}
}

// taken is the state that the scheduler makes of the cluster's claims (allocateddevices.go of the plugin).
func taken(claims []*resourceapi.ResourceClaim) structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, claim := range claims {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, one := range claim.Status.Allocation.Devices.Results {
			device := structured.MakeDeviceID(one.Driver, one.Pool, one.Device)
			switch {
			case one.AdminAccess != nil && *one.AdminAccess:
			case one.ShareID != nil:
				state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(device, one.ShareID))
				if one.ConsumedCapacity != nil {
					state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(device, one.ConsumedCapacity))
				}
			default:
				state.AllocatedDevices.Insert(device)
			}
		}
	}
	return state
}

// setDefaults does what the API server does on create (pkg/apis/resource/v1/defaults.go).
func setDefaults(claim *resourceapi.ResourceClaim) {
	fill := func(mode *resourceapi.DeviceAllocationMode, count *int64) {
		if *mode == "" {
			*mode = resourceapi.DeviceAllocationModeExactCount
		}
		if *mode == resourceapi.DeviceAllocationModeExactCount && *count == 0 {
			*count = 1
		}
	}
	for i := range claim.Spec.Devices.Requests {
		request := &claim.Spec.Devices.Requests[i]
		if request.Exactly != nil {
			fill(&request.Exactly.AllocationMode, &request.Exactly.Count)
		}
		for j := range request.FirstAvailable {
			fill(&request.FirstAvailable[j].AllocationMode, &request.FirstAvailable[j].Count)
		}
	}
}
